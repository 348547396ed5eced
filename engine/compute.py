"""What a step is computed with: the kernels, threads and streams of one machine, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

import torch

from tierstep.engine.accelerator import Mark
from tierstep.engine.adamw.kernels import CpuKernel
from tierstep.engine.gradients import Gradients, fold
from tierstep.engine.pipeline import Processor
from tierstep.engine.planning import MemoryPlan
from tierstep.engine.trace import Trace
from tierstep.engine.update import CpuProcessor, Update

Publish = Callable[[int, Mark], None]


class Compute(Protocol):
    """Implementations agree in every bit. One thread at a time calls."""

    def reserve(self, plan: MemoryPlan) -> None:
        """Take the memory that `plan` has for passing records on, in place of an earlier plan's. Not in a step."""

    def close(self) -> None:
        """Give the memory back. May be called twice."""

    @property
    def lanes(self) -> int:
        """How many updating lanes a step has."""

    def norm(self, gradients: Gradients, positions: Sequence[int]) -> float:
        """Return the 2-norm of some shards' gradients together; inf or nan where one has inf or nan. Blocks."""

    def is_finite(self, gradients: Gradients, positions: Sequence[int]) -> bool:
        """Say whether some shards' gradients have neither inf nor nan. Blocks."""

    def begin(self, update: Update, on_device: Collection[int], trace: Trace, publish: Publish) -> Sequence[Processor]:
        """Return the lanes' workers for one step; the calling thread's stream has the gradients.

        `on_device` are the subgroups whose records are on the device. `publish` is told of every subgroup whose weights
        are final but for work of a stream.
        """


class CpuCompute:
    """See `Compute`: everything on the CPU, the threads shared between the two ends."""

    def __init__(self, kernel: CpuKernel, threads: int) -> None:
        self._kernel = kernel
        self._threads = threads
        self._shares = {"cpu": 1} if threads == 1 else {"gpu": threads // 2, "cpu": threads - threads // 2}

    def reserve(self, plan: MemoryPlan) -> None:
        """See `Compute.reserve`: everything is updated where it is."""

    def close(self) -> None:
        """See `Compute.close`."""

    @property
    def lanes(self) -> int:
        """See `Compute.lanes`; a single thread works from one end."""
        return len(self._shares)

    def norm(self, gradients: Gradients, positions: Sequence[int]) -> float:
        """See `Compute.norm`."""
        return math.sqrt(float(squares(gradients, positions, partial(self._kernel.sum_squares, threads=self._threads))))

    def is_finite(self, gradients: Gradients, positions: Sequence[int]) -> bool:
        """See `Compute.is_finite`."""
        return all(self._kernel.all_finite(gradients.of(i), threads=self._threads) for i in positions)

    def begin(self, update: Update, on_device: Collection[int], trace: Trace, publish: Publish) -> Sequence[Processor]:
        """See `Compute.begin`; on the CPU, the device is the CPU."""
        return [CpuProcessor(lane, self._kernel, threads, update, trace) for lane, threads in self._shares.items()]


def squares(
    gradients: Gradients, positions: Sequence[int], sum_squares: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the sum of squares of gradients, fp64 without dimensions on their device; the same on every device."""
    sums = [sum_squares(gradients.of(position)) for position in positions]
    return fold(torch.cat(sums)) if sums else torch.zeros((), dtype=torch.float64)
