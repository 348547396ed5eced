"""A step computed by a GPU and the CPU at once: `Compute` for parameters on a GPU.

    gpu lane     h2d: record into a device slot -> gpu: update there -> d2h: record back
                 (records of the device tier are updated where they are)
    cpu lane     d2h: gradients and weights into a staging buffer -> cpu: update the record in host memory
                 -> h2d: weights

Every arrow is a mark that the next stream waits for. The host waits for a mark only where it has to touch the bytes
itself: before the CPU's update, and before a record is given back.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tierstep.engine.accelerator import Accelerator, Mark, Stream
from tierstep.engine.adamw.formula import Scalars
from tierstep.engine.adamw.kernels import CpuKernel, UpdateKernel
from tierstep.engine.adamw.piece import Piece
from tierstep.engine.compute import Publish, squares
from tierstep.engine.gradients import Gradients
from tierstep.engine.pipeline import Processor
from tierstep.engine.planning import STAGING_ALIGNMENT_BYTES, MemoryPlan
from tierstep.engine.subgroups import Slice
from tierstep.engine.timeline import Event
from tierstep.engine.trace import Trace
from tierstep.engine.update import Update
from tierstep.io.alignment import align_up
from tierstep.tiers.slots import Arena

RESIDENT_DEPTH = 4  # subgroups of the device tier whose updates are under way at once


@dataclass
class Staging:
    """Pinned memory for one subgroup's weights and gradients; the next may fill it when `free` is reached."""

    memory: torch.Tensor
    free: Mark


class GpuCompute:
    """See `Compute`. Holds the device slots, the staging buffers and the streams from step to step."""

    def __init__(self, accelerator: Accelerator, gpu_kernel: UpdateKernel, cpu_kernel: CpuKernel, threads: int) -> None:
        self._accelerator = accelerator
        self._gpu_kernel = gpu_kernel
        self._cpu_kernel = cpu_kernel
        self._threads = threads
        self._streams = Streams.of(accelerator)
        self._slots: deque[torch.Tensor] = deque()
        self._stagings: deque[Staging] = deque()
        self._arena: Arena | None = None
        pinned = accelerator.device.type == "cuda"
        self._number = torch.empty((), dtype=torch.float64, pin_memory=pinned)

    def reserve(self, plan: MemoryPlan) -> None:
        """See `Compute.reserve`."""
        self.close()
        free = self._streams.gpu.mark()
        device = self._accelerator.device
        for _ in range(plan.device_slot_count):
            self._slots.append(torch.empty(plan.device_slot_nbytes, dtype=torch.uint8, device=device))
        self._arena = Arena(plan.staging_count * plan.staging_nbytes, pinned=device.type == "cuda")
        for _ in range(plan.staging_count):
            self._stagings.append(Staging(self._arena.cut(plan.staging_nbytes)[0], free))

    def close(self) -> None:
        """See `Compute.close`."""
        for staging in self._stagings:
            staging.free.wait()
        self._slots.clear()
        self._stagings.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    @property
    def lanes(self) -> int:
        """See `Compute.lanes`."""
        return 2

    def norm(self, gradients: Gradients, positions: Sequence[int]) -> float:
        """See `Compute.norm`. The host waits for the gradients here, and nowhere else."""
        found = squares(gradients, positions, partial(self._gpu_kernel.sum_squares, threads=1))
        self._number.copy_(found, non_blocking=True)
        self._accelerator.caller().mark().wait()
        return math.sqrt(float(self._number))

    def is_finite(self, gradients: Gradients, positions: Sequence[int]) -> bool:
        """See `Compute.is_finite`."""
        return self.norm(gradients, positions) < float("inf")  # squares of fp32 numbers do not overflow fp64

    def begin(self, update: Update, on_device: Collection[int], trace: Trace, publish: Publish) -> Sequence[Processor]:
        """See `Compute.begin`."""
        ready = (
            self._accelerator.caller().mark()
        )  # gradients and weights are final, and nobody reads the weights any more
        for stream in (self._streams.gpu, self._streams.weights_out, self._streams.weights_in):
            stream.after(ready)
        clock = Clock(trace, time.perf_counter(), self._streams.h2d.mark())
        gpu = GpuProcessor(update, self._gpu_kernel, self._streams, self._slots, frozenset(on_device), publish, clock)
        cpu = StagedCpuProcessor(update, self._cpu_kernel, self._threads, self._streams, self._stagings, publish, clock)
        return [gpu, cpu]


@dataclass(frozen=True)
class Streams:
    """What works beside each other on the device. Two of them move bytes the same way, so that neither of them has
    to wait behind a transfer of the other that is not ready yet."""

    h2d: Stream
    gpu: Stream
    d2h: Stream
    weights_out: Stream
    weights_in: Stream

    @classmethod
    def of(cls, accelerator: Accelerator) -> Streams:
        """Return new streams."""
        return cls(*(accelerator.stream() for _ in range(5)))


@dataclass(frozen=True)
class Clock:
    """Puts what the device does on the host's clock (perf_counter). Nothing is waited for until somebody looks."""

    trace: Trace
    started: float
    origin: Mark

    def run(self, stream: Stream, lane: str, subgroup: int, nbytes: int, work: Callable[[], None]) -> Mark:
        """Give a stream work; return the mark of its end."""
        begin = stream.mark()
        stream.run(work)
        end = stream.mark()
        self.trace.add_later(partial(self._event, lane, subgroup, nbytes, begin, end))
        return end

    def _event(self, lane: str, subgroup: int, nbytes: int, begin: Mark, end: Mark) -> Event:
        start, stop = (self.started + mark.seconds_since(self.origin) for mark in (begin, end))
        return Event(lane, subgroup, start, stop, nbytes)


@dataclass(frozen=True)
class GpuProcessor:
    """Updates subgroups on the GPU, wherever their records are."""

    step: Update
    kernel: UpdateKernel
    streams: Streams
    slots: deque[torch.Tensor]
    on_device: frozenset[int]
    publish: Publish
    clock: Clock
    lane: str = "gpu"

    @property
    def depth(self) -> int:
        """See `Processor.depth`."""
        return len(self.slots) or RESIDENT_DEPTH

    def start(self, subgroup: int, fields: dict[str, torch.Tensor]) -> Callable[[], None]:
        """See `Processor.start`."""
        layout, streams = self.step.subgroups[subgroup].layout, self.streams
        nbytes = layout.nbytes
        if subgroup in self.on_device:
            updated = self.clock.run(streams.gpu, "gpu", subgroup, nbytes, partial(self._update, subgroup, fields))
            self.publish(subgroup, updated)
            return updated.wait
        inside = layout.views(self.slots[0])  # free: no more than `depth` subgroups are under way
        arrived = self.clock.run(streams.h2d, "h2d", subgroup, nbytes, partial(_copy, inside, fields))
        streams.gpu.after(arrived)
        updated = self.clock.run(streams.gpu, "gpu", subgroup, nbytes, partial(self._update, subgroup, inside))
        streams.d2h.after(updated)
        stored = self.clock.run(streams.d2h, "d2h", subgroup, nbytes, partial(_copy, fields, inside))
        self.slots.rotate(-1)
        self.publish(subgroup, updated)
        return stored.wait

    def _update(self, subgroup: int, fields: dict[str, torch.Tensor]) -> None:
        self.step.update(subgroup, fields, self.kernel, threads=1)


@dataclass(frozen=True)
class StagedCpuProcessor:
    """Updates subgroups on the CPU whose weights and gradients are on the GPU, and whose records are in host memory."""

    step: Update
    kernel: CpuKernel
    threads: int
    streams: Streams
    stagings: deque[Staging]
    publish: Publish
    clock: Clock
    lane: str = "cpu"

    @property
    def depth(self) -> int:
        """See `Processor.depth`."""
        return len(self.stagings)

    def start(self, subgroup: int, fields: dict[str, torch.Tensor]) -> Callable[[], None]:
        """See `Processor.start`."""
        staging = self.stagings[0]
        parts = self.step.parts(subgroup)
        pieces = self._staged(parts, staging.memory)
        nbytes = sum(_nbytes(piece.weight) + _nbytes(piece.grad) for piece in pieces)
        self.streams.weights_out.after(staging.free)
        arrived = self.clock.run(self.streams.weights_out, "d2h", subgroup, nbytes, partial(self._fill, parts, pieces))
        self.stagings.rotate(-1)
        return partial(self._update, subgroup, fields, staging, pieces, arrived)

    def _staged(self, parts: Sequence[tuple[Slice, torch.Tensor, Scalars]], memory: torch.Tensor) -> list[Piece]:
        """Return the pieces of a subgroup in a staging buffer, still to be filled."""
        pieces, end = [], 0

        def cut(length: int, dtype: torch.dtype) -> torch.Tensor:
            nonlocal end
            start, end = end, align_up(end + length * dtype.itemsize, STAGING_ALIGNMENT_BYTES)
            return memory[start : start + length * dtype.itemsize].view(dtype)

        for part, gradient, scalars in parts:
            weight = cut(part.length, self.step.shards[part.shard].dtype)
            pieces.append(Piece(weight, cut(part.length, gradient.dtype), part.offset, scalars))
        return pieces

    def _fill(self, parts: Sequence[tuple[Slice, torch.Tensor, Scalars]], pieces: Sequence[Piece]) -> None:
        for (part, gradient, _), piece in zip(parts, pieces, strict=True):
            weights = self.step.shards[part.shard].weights(part.start, part.stop)
            piece.weight.copy_(weights, non_blocking=True)
            piece.grad.copy_(gradient, non_blocking=True)

    def _update(
        self,
        subgroup: int,
        fields: Mapping[str, torch.Tensor],
        staging: Staging,
        pieces: Sequence[Piece],
        arrived: Mark,
    ) -> None:
        arrived.wait()
        start = time.perf_counter()
        self.kernel.update(pieces, fields, threads=self.threads)
        nbytes = self.step.subgroups[subgroup].layout.nbytes
        self.clock.trace.add("cpu", subgroup, start, time.perf_counter(), nbytes)
        staging.free = self.clock.run(
            self.streams.weights_in,
            "h2d",
            subgroup,
            sum(_nbytes(piece.weight) for piece in pieces),
            partial(self._empty, subgroup, pieces),
        )
        self.publish(subgroup, staging.free)

    def _empty(self, subgroup: int, pieces: Sequence[Piece]) -> None:
        for (part, _, _), piece in zip(self.step.parts(subgroup), pieces, strict=True):
            self.step.shards[part.shard].put_weights(part.start, part.stop, piece.weight)


def _copy(targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name], non_blocking=True)


def _nbytes(values: torch.Tensor) -> int:
    return values.numel() * values.element_size()
