"""A whole `optimizer.step()` against the kernel alone, torch's fused AdamW, and the drive's own limit.

    python -m tierstep.bench.step_time [--params 100e6] [--threads N] [--repeats 9] [--nvme DIR] [--nvme-params 400e6]

All run in this process, in turns, on the same threads. Host tier: the limit is our kernel's own time for the same
parameters, without anything around it. NVMe tier (with --nvme): all records in files, memory for slots only; the limit
is the time that the bare bytes of the step need in the same directory: records of the same size, through the same
backend, reads and writes at once or one after the other, whichever is faster. The last line is one JSON object with
all raw samples; bench/results/ keeps it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tierstep import AdamW, StepReport, Tiers
from tierstep.bench.contestants import (
    BETAS,
    EPS,
    LR,
    WEIGHT_DECAY,
    Work,
    median,
    numbers,
    own_kernel,
    take_turns,
    torch_fused,
    torch_fused_with_casts,
)
from tierstep.bench.provenance import publish
from tierstep.engine.adamw import cpu_kernel
from tierstep.io.backend import IoBackend
from tierstep.io.requests import Completion, Read, Write
from tierstep.tiers.build import open_files
from tierstep.tiers.slots import Arena

SUBGROUP_BYTES = 32 << 20
SLOTS = 8


def main() -> None:
    """Run the benchmark."""
    options = _options()
    numel = int(options.params)
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"params": numel, "threads": options.threads}
    result["host"] = _host_tier(numel, options)
    if options.nvme is not None:
        result["nvme"] = _nvme_tier(int(options.nvme_params), options)
    publish("step_time", result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="whole optimizer steps compared")
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--nvme-params", type=float, default=400e6)
    parser.add_argument("--nvme", type=Path, default=None, help="an existing directory on the drive to measure")
    return parser.parse_args()


def _host_tier(numel: int, options: argparse.Namespace) -> dict[str, Any]:
    with _optimizer(numel, Tiers(gpu=0, subgroup=SUBGROUP_BYTES, threads=options.threads)) as optimizer:
        contestants: dict[str, Work] = {
            "kernel alone, bf16 (the limit)": own_kernel(cpu_kernel(), numel, torch.bfloat16, options.threads),
            "tierstep step, bf16, host tier": optimizer.step,
            "torch fused, bf16 + casts": torch_fused_with_casts(numel),
            "torch fused, fp32": torch_fused(numel),
        }
        samples = take_turns(contestants, options.repeats)
    limit = median(samples["kernel alone, bf16 (the limit)"])
    print(f"{numel / 1e6:.0f} M parameters, {options.threads} threads, median of {options.repeats}")
    for name, seconds in samples.items():
        print(f"{name:34}{median(seconds) * 1e3:9.1f} ms{median(seconds) / limit:7.2f} x the kernel's time")
    return {"seconds": samples}


def _nvme_tier(numel: int, options: argparse.Namespace) -> dict[str, Any]:
    slot_nbytes = SUBGROUP_BYTES + (1 << 20)
    tiers = Tiers(gpu=0, ram=SLOTS * slot_nbytes, nvme=[options.nvme], subgroup=SUBGROUP_BYTES, slots=SLOTS)
    with ExitStack() as resources:
        optimizer = resources.enter_context(_optimizer(numel, tiers))
        backend, (folder,) = open_files(tiers, resources)
        sizes = [subgroup.layout.padded_nbytes for subgroup in optimizer.plan.subgroups]
        moved = _step_and_moved_bytes(optimizer)
        contestants = {"step": optimizer.step, **_bare_bytes(backend, folder, sizes, moved)}
        samples = take_turns(contestants, options.repeats)
    bare = min(median(samples["bare bytes, at once"]), median(samples["bare bytes, one after the other"]))
    share, rate = bare / median(samples["step"]), moved / median(samples["step"])
    print(f"nvme tier: step {median(samples['step']):.3f} s, bare bytes {bare:.3f} s: {share:.0%} of the limit")
    print(f"moved {moved / numel:.2f} bytes a parameter, {rate / 1e9:.2f} GB/s; record {sizes[0]} bytes")
    return {"params": numel, "seconds": samples, "moved_bytes": moved, "record_bytes": sizes}


def _optimizer(numel: int, tiers: Tiers) -> AdamW:
    parameter = torch.nn.Parameter(numbers(numel, torch.bfloat16))
    parameter.grad = numbers(numel, torch.bfloat16)
    return AdamW([("weight", parameter)], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, tiers=tiers)


def _step_and_moved_bytes(optimizer: AdamW) -> int:
    """Return the file bytes of a step in the steady state."""
    for _ in range(3):
        optimizer.step()
    report = optimizer.report()
    if not isinstance(report, StepReport):
        raise RuntimeError("a step leaves a report")
    return report.bytes_read + report.bytes_written


def _bare_bytes(backend: IoBackend, folder: Path, sizes: Sequence[int], moved: int) -> dict[str, Work]:
    """Return transfers of as many bytes as a step moves, in records of the same size, and nothing else."""
    count = moved // 2 // max(sizes)
    paths = [folder / f"bare-{index}" for index in range(len(sizes))]
    memory = Arena(SLOTS * max(sizes)).cut(SLOTS * max(sizes))[1]
    parts = [memory[i * max(sizes) : (i + 1) * max(sizes)] for i in range(SLOTS)]
    for path in paths:
        backend.allocate(path, max(sizes))
        backend.submit(Write(path, 0, parts[0])).wait()
    reads = [Read(paths[i % len(paths)], 0, parts[i % 4]) for i in range(count)]
    writes = [Write(paths[(i + count) % len(paths)], 0, parts[4 + i % 4]) for i in range(count)]

    def at_once() -> None:
        _keep_in_flight(backend, (request for pair in zip(reads, writes, strict=True) for request in pair), SLOTS)

    def one_after_the_other() -> None:
        _keep_in_flight(backend, iter(reads), 4)
        _keep_in_flight(backend, iter(writes), 4)

    return {"bare bytes, at once": at_once, "bare bytes, one after the other": one_after_the_other}


def _keep_in_flight(backend: IoBackend, requests: Iterator[Read | Write], depth: int) -> None:
    pending: list[Completion] = []
    for request in requests:
        if len(pending) == depth:
            pending.pop(0).wait()
        pending.append(backend.submit(request))
    for completion in pending:
        completion.wait()


if __name__ == "__main__":
    main()
