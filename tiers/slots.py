"""Exact-size host memory for records, and the staging slots that cold records pass through."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from tierstep.errors import StepInterrupted
from tierstep.io.alignment import ALIGNMENT_BYTES, align_up
from tierstep.io.buffers import PageBuffer
from tierstep.tiers.pinning import Pinning


class Arena:
    """One block of host memory of exactly the asked size, cut from the front.

    torch's allocator of pinned memory rounds every allocation up to a power of two; an arena does not. The memory is
    zero at first and takes no RAM until it is touched or `pinned`, for transfers to and from a GPU. It is freed when
    the last tensor cut from it is gone.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self._buffer = PageBuffer(nbytes)
        self._pinning = Pinning(self._buffer) if pinned and nbytes else None
        self._used_bytes = 0

    def close(self) -> None:
        """Unpin the memory; what was cut from it stays usable. No transfer may be under way. May be called twice."""
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning.close()

    def cut(self, nbytes: int, alignment_bytes: int = 64) -> tuple[torch.Tensor, memoryview]:
        """Return the next `nbytes` as a uint8 tensor and as a memoryview of the same bytes."""
        start = align_up(self._used_bytes, alignment_bytes)
        if start + nbytes > self.nbytes:
            raise ValueError(f"arena of {self.nbytes} bytes has no {nbytes} bytes left after {start}")
        self._used_bytes = start + nbytes
        view = self._buffer.view[start : start + nbytes]
        return torch.frombuffer(view, dtype=torch.uint8), view


@dataclass(frozen=True)
class Slot:
    """A staging buffer of one record; whoever acquired it owns it until it is released."""

    index: int
    tensor: torch.Tensor
    memory: memoryview


class SlotPool:
    """A fixed number of equal slots. `acquire` blocks while all are taken: that is the pipeline's back-pressure."""

    def __init__(self, count: int, nbytes: int, *, pinned: bool = False) -> None:
        if nbytes % ALIGNMENT_BYTES:
            raise ValueError(f"slots of {nbytes} bytes are not aligned for direct I/O")
        self.count = count
        self.slot_nbytes = nbytes
        self._arena = Arena(count * nbytes, pinned=pinned)
        self._free = [Slot(index, *self._arena.cut(nbytes, alignment_bytes=1)) for index in range(count)]
        self._changed = threading.Condition()
        self._interrupted = False

    @property
    def nbytes(self) -> int:
        """Bytes of all slots together."""
        return self.count * self.slot_nbytes

    @property
    def free_count(self) -> int:
        """How many slots nobody owns now."""
        return len(self._free)

    def acquire(self) -> Slot:
        """Take a free slot; block until there is one. Raises `StepInterrupted` while the pool is interrupted."""
        while (slot := self.acquire_within(None)) is None:
            pass
        return slot

    def acquire_within(self, seconds: float | None) -> Slot | None:
        """Take a free slot; block until there is one, or return None after `seconds`. Raises as `acquire` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._interrupted, seconds)
            if self._interrupted:
                raise StepInterrupted("the step failed elsewhere; no further slot is given out")
            return self._free.pop() if self._free else None

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def close(self) -> None:
        """Unpin the memory. No transfer may be under way. May be called twice."""
        self._arena.close()

    def interrupt(self, *, interrupted: bool) -> None:
        """Wake and refuse everyone who waits for a slot (True), or serve again (False)."""
        with self._changed:
            self._interrupted = interrupted
            self._changed.notify_all()
