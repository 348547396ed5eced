"""One step's numbers, and the processors that apply them to subgroups."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tierstep.engine.adamw.formula import Scalars
from tierstep.engine.adamw.kernels import CpuKernel, UpdateKernel
from tierstep.engine.adamw.piece import Piece
from tierstep.engine.gradients import Gradients
from tierstep.engine.shards import Shard
from tierstep.engine.subgroups import Slice, Subgroup
from tierstep.engine.trace import Trace


@dataclass(frozen=True)
class Update:
    """All that the update of any subgroup in one step depends on, besides its record and its weights.

    `scalars[shard]` is None for a shard that has no gradient.
    """

    shards: Sequence[Shard]
    subgroups: Sequence[Subgroup]
    gradients: Gradients
    scalars: Sequence[Scalars | None]

    def touched_subgroups(self) -> list[int]:
        """Return the subgroups that hold elements of a shard with a gradient."""
        return [
            index
            for index, subgroup in enumerate(self.subgroups)
            if any(self.scalars[part.shard] is not None for part in subgroup.slices)
        ]

    def parts(self, subgroup: int) -> list[tuple[Slice, torch.Tensor, Scalars]]:
        """Return the slices of a subgroup that are to be updated, with their flat gradients and their numbers."""
        found = []
        for part in self.subgroups[subgroup].slices:
            gradient, scalars = self.gradients.flat[part.shard], self.scalars[part.shard]
            if gradient is not None and scalars is not None:
                found.append((part, gradient[part.start : part.stop], scalars))
        return found

    def update(self, subgroup: int, fields: Mapping[str, torch.Tensor], kernel: UpdateKernel, threads: int) -> None:
        """Update a subgroup where its fields, weights and gradients are, all on one device."""
        pieces = [
            Piece(self.shards[part.shard].weights(part.start, part.stop), gradient, part.offset, scalars)
            for part, gradient, scalars in self.parts(subgroup)
        ]
        kernel.update(pieces, fields, threads=threads)
        for (part, _, _), piece in zip(self.parts(subgroup), pieces, strict=True):
            self.shards[part.shard].put_weights(part.start, part.stop, piece.weight)


@dataclass(frozen=True)
class CpuProcessor:
    """Updates subgroups on `threads` CPU threads, in place in host memory, one at a time."""

    lane: str
    kernel: CpuKernel
    threads: int
    step: Update
    trace: Trace
    depth: int = 1

    def start(self, subgroup: int, fields: dict[str, torch.Tensor]) -> Callable[[], None]:
        """See `Processor.start`."""
        return partial(self._update, subgroup, fields)

    def _update(self, subgroup: int, fields: dict[str, torch.Tensor]) -> None:
        start = time.perf_counter()
        self.step.update(subgroup, fields, self.kernel, self.threads)
        nbytes = self.step.subgroups[subgroup].layout.nbytes
        self.trace.add(self.lane, subgroup, start, time.perf_counter(), nbytes)
