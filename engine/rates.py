"""How fast this machine updates parameters and moves bytes, measured in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from tierstep.configs.schema import Tiers
from tierstep.engine.accelerator import Accelerator
from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.adamw.formula import scalars
from tierstep.engine.adamw.kernels import UpdateKernel, cpu_kernel, gpu_kernel
from tierstep.engine.adamw.piece import Piece
from tierstep.engine.link import Link
from tierstep.engine.performance import GpuRates, MachineRates
from tierstep.io.backend import IoBackend
from tierstep.io.requests import Read, Request, Write
from tierstep.tiers.build import open_files
from tierstep.tiers.record import RecordLayout
from tierstep.tiers.slots import Arena

NUMEL = 1 << 25  # of bf16 parameters: 448 MiB with weights and gradients, larger than most caches
KERNEL_BYTES = 26 * NUMEL  # twice the state and the weights, and the gradients
UPDATES = 7
UPDATES_BESIDE = 3  # transfers
FILE_BYTES = 64 << 20
ROUNDS = 3


def measure_rates(tiers: Tiers, accelerator: Accelerator | None = None) -> MachineRates:
    """Measure the update in memory, the files in the nvme directories if there are any, and the GPU if there is one.

    Blocks for seconds. Takes 600 MiB of host memory, 128 MiB of it pinned for a GPU, as much of the GPU's memory, and a
    temporary file in each directory.
    """
    threads = tiers.threads or torch.get_num_threads()
    kernel = cpu_kernel(tiers.kernel)
    on_cpu = _an_update(kernel, torch.device("cpu"), threads)
    update, files = _host_rate(on_cpu, KERNEL_BYTES), _file_rate(tiers) if tiers.nvme else None
    if accelerator is None:
        gradient = torch.ones(NUMEL, dtype=torch.bfloat16)
        check = _host_rate(lambda: kernel.all_finite(gradient, threads=threads), gradient.nbytes)
        return MachineRates(update, update, check, files)
    with ExitStack() as resources:
        link = Link(accelerator, resources)
        memory = link.beside(on_cpu, UPDATES_BESIDE, KERNEL_BYTES)
        on_gpu = _an_update(gpu_kernel(tiers.kernel), accelerator.device, 1)
        gpu = GpuRates(_device_rate(accelerator, on_gpu), *link.rates())
        return MachineRates(update, max(memory, update), gpu.update, files, gpu)  # the check is bound by memory as well


def _an_update(kernel: UpdateKernel, device: torch.device, threads: int) -> Callable[[], None]:
    """Return an update of a record in memory of its own."""
    layout = RecordLayout(NUMEL, record_fields(torch.bfloat16))
    record = Arena(layout.padded_nbytes).cut(layout.padded_nbytes)[0]
    fields = layout.views(record.to(device))
    weight = torch.ones(NUMEL, dtype=torch.bfloat16, device=device)
    gradient = torch.full_like(weight, 1e-3)
    numbers = scalars(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1)
    return partial(kernel.update, [Piece(weight, gradient, 0, numbers)], fields, threads=threads)


def _host_rate(work: Callable[[], object], nbytes: int) -> float:
    work()  # touches the memory
    seconds = []
    for _ in range(UPDATES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return nbytes / sorted(seconds)[UPDATES // 2]


def _device_rate(accelerator: Accelerator, update: Callable[[], None]) -> float:
    stream = accelerator.stream()
    stream.after(accelerator.caller().mark())
    stream.run(update)  # compiles the kernel
    start = stream.mark()
    for _ in range(UPDATES):
        stream.run(update)
    return UPDATES * KERNEL_BYTES / stream.mark().seconds_since(start)


def _file_rate(tiers: Tiers) -> float:
    """Read one file and write another at once in every directory, as a step does, over files that exist already."""
    with ExitStack() as resources:
        backend, folders = open_files(tiers, resources)
        memory = Arena(2 * FILE_BYTES * len(folders)).cut(2 * FILE_BYTES * len(folders))[1]
        parts = [memory[i * FILE_BYTES : (i + 1) * FILE_BYTES] for i in range(2 * len(folders))]
        reads = [Read(folder / "rate-read", 0, parts[i]) for i, folder in enumerate(folders)]
        writes = [Write(folder / "rate-write", 0, parts[len(folders) + i]) for i, folder in enumerate(folders)]
        requests: list[Request] = [*reads, *writes]
        for request in requests:
            backend.allocate(request.path, FILE_BYTES)
            backend.submit(Write(request.path, 0, parts[0])).wait()
        seconds = min(_seconds_together(backend, requests) for _ in range(ROUNDS))
    return len(parts) * FILE_BYTES / seconds


def _seconds_together(backend: IoBackend, requests: Sequence[Request]) -> float:
    start = time.perf_counter()
    for completion in [backend.submit(request) for request in requests]:
        completion.wait()
    return time.perf_counter() - start
