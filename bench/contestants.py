"""The updates that are compared: each is a closure over data of its own, on huge pages, never denormal."""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tierstep.engine.adamw import CpuKernel
from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.adamw.formula import scalars
from tierstep.engine.adamw.piece import Piece
from tierstep.tiers.slots import Arena

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
Work = Callable[[], object]


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return uniform numbers from 0.1 to 1 in memory on huge pages, as all contestants use."""
    nbytes = numel * dtype.itemsize
    return Arena(nbytes).cut(nbytes)[0].view(dtype).uniform_(0.1, 1.0)


def own_kernel(kernel: CpuKernel, numel: int, dtype: torch.dtype, threads: int) -> Work:
    """Our kernel: gradient and weight of `dtype` in and out, in one pass."""
    weight, grad = numbers(numel, dtype), numbers(numel, dtype)
    fields = {
        name: numbers(numel, d) if d.is_floating_point else torch.zeros(numel, dtype=d)
        for name, d in record_fields(dtype)
    }
    scalar = scalars(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, step=3)
    return lambda: kernel.update([Piece(weight, grad, 0, scalar)], fields, threads=threads)


def torch_fused(numel: int) -> Work:
    """torch's fused AdamW on fp32 weights and gradients."""
    parameter = torch.nn.Parameter(numbers(numel, torch.float32))
    parameter.grad = numbers(numel, torch.float32)
    return torch.optim.AdamW([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True).step


def torch_fused_with_casts(numel: int) -> Work:
    """The same for a bf16 model with an fp32 master: the gradient is cast before and the weight after."""
    weight, grad = numbers(numel, torch.bfloat16), numbers(numel, torch.bfloat16)
    master = torch.nn.Parameter(numbers(numel, torch.float32))
    master.grad = numbers(numel, torch.float32)
    optimizer = torch.optim.AdamW([master], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)

    def work() -> None:
        master.grad.copy_(grad)  # type: ignore[union-attr]
        optimizer.step()
        weight.copy_(master.detach())

    return work


def deepspeed_cpu_adam(numel: int) -> Work:
    """DeepSpeedCPUAdam on fp32; raises ImportError where it is not installed. Compiles for a minute the first time."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(numbers(numel, torch.float32))
    parameter.grad = numbers(numel, torch.float32)
    optimizer = DeepSpeedCPUAdam([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True)
    return lambda: optimizer.step()


def same_traffic(numel: int, threads: int) -> Work:
    """Read and write what a bf16 update reads and writes, without its arithmetic. Compiles traffic.cpp with c++."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "traffic.so"
        source = Path(__file__).with_name("traffic.cpp")
        subprocess.run(["c++", "-O3", "-shared", "-fPIC", "-fopenmp", "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).traffic
    sizes = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    arrays = [numbers(numel, dtype) for dtype in sizes]
    function.argtypes = [ctypes.c_void_p] * len(arrays) + [ctypes.c_int64, ctypes.c_int32]
    function.restype = None
    return lambda: function(*(array.data_ptr() for array in arrays), numel, threads)


def memory_copy(nbytes: int, threads: int) -> Work:
    """Copy between two large arrays, with torch."""
    source, target = numbers(nbytes // 4, torch.float32), numbers(nbytes // 4, torch.float32)
    torch.set_num_threads(threads)
    return lambda: target.copy_(source)


def take_turns(contestants: Mapping[str, Work], repeats: int) -> dict[str, list[float]]:
    """Run all in turns; return the seconds of each run. The first turn warms up and is not kept."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, work in contestants.items():
            start = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median(samples: list[float]) -> float:
    """Return the median of samples."""
    return statistics.median(samples)
