"""How fast this machine updates parameters and moves files, measured in a few seconds, and what a step takes then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from tierstep.configs.schema import Tiers
from tierstep.engine.adamw import cpu_kernel
from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.adamw.formula import scalars
from tierstep.engine.adamw.piece import Piece
from tierstep.engine.planning import MemoryPlan
from tierstep.io.backend import IoBackend
from tierstep.io.requests import Read, Request, Write
from tierstep.tiers.build import open_files
from tierstep.tiers.record import RecordLayout
from tierstep.tiers.slots import Arena

KERNEL_NUMEL = 1 << 23  # 80 MiB of state: larger than any cache
FILE_BYTES = 64 << 20
ROUNDS = 3


@dataclass(frozen=True)
class Rates:
    """Measured speeds: parameters updated a second, and file bytes a second, reads and writes together.

    `file_bytes_per_second` is None when no directory is in use.
    """

    parameters_per_second: float
    file_bytes_per_second: float | None

    def step_seconds(self, plan: MemoryPlan) -> float:
        """Return the least time of a step: that of its slowest lane. Reads and writes share the drive."""
        moved = 2 * plan.moved_bytes_per_step
        files = moved / self.file_bytes_per_second if moved and self.file_bytes_per_second else 0.0
        return max(plan.numel / self.parameters_per_second, files)


def measure_rates(tiers: Tiers) -> Rates:
    """Measure the update in memory, and the files in the nvme directories if there are any. Blocks for seconds."""
    return Rates(_update_rate(tiers), _file_rate(tiers) if tiers.nvme else None)


def _update_rate(tiers: Tiers) -> float:
    kernel, threads = cpu_kernel(tiers.kernel), tiers.threads or torch.get_num_threads()
    layout = RecordLayout(KERNEL_NUMEL, record_fields(torch.bfloat16))
    fields = layout.views(Arena(layout.padded_nbytes).cut(layout.padded_nbytes)[0])
    weight = torch.ones(KERNEL_NUMEL, dtype=torch.bfloat16)
    gradient = torch.full_like(weight, 1e-3)
    numbers = scalars(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1)
    seconds = []
    for _ in range(ROUNDS + 1):  # the first touches the memory
        start = time.perf_counter()
        kernel.update([Piece(weight, gradient, 0, numbers)], fields, threads=threads)
        seconds.append(time.perf_counter() - start)
    return KERNEL_NUMEL / min(seconds[1:])


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
