"""A GPU as the engine sees it: streams that work in order and beside each other, and marks in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a stream's order of work. Any thread may use it."""

    def wait(self) -> None:
        """Block until the stream has got there."""

    def seconds_since(self, earlier: Mark) -> float:
        """Return the time between two marks, `earlier` one that was passed. Blocks until this one is."""


class Stream(Protocol):
    """Works off what it is given, in order, beside the other streams. One thread at a time gives it work."""

    def run(self, work: Callable[[], None]) -> None:
        """Have the device do `work`, which neither waits for it nor looks at its results. Does not block."""

    def after(self, mark: Mark) -> None:
        """Have everything that follows wait for `mark`. Does not block."""

    def mark(self) -> Mark:
        """Return the place after all that was given so far."""


class Accelerator(Protocol):
    """One device."""

    device: torch.device

    def free_bytes(self) -> int:
        """Return how much of its memory is free now."""

    def stream(self) -> Stream:
        """Return a new stream."""

    def caller(self) -> Stream:
        """Return the stream that the calling thread's torch operations go to now."""


class CudaAccelerator:
    """See `Accelerator`: a CUDA device, its streams and events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free_bytes(self) -> int:
        """See `Accelerator.free_bytes`; what torch's allocator holds and nobody uses counts as free."""
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused

    def stream(self) -> CudaStream:
        """See `Accelerator.stream`."""
        return CudaStream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def caller(self) -> CudaStream:
        """See `Accelerator.caller`."""
        return CudaStream(torch.cuda.current_stream(self.device))


class CudaStream:
    """See `Stream`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        """See `Stream.run`."""
        with torch.cuda.stream(self._stream):
            work()

    def after(self, mark: Mark) -> None:
        """See `Stream.after`."""
        if not isinstance(mark, CudaMark):
            raise TypeError(f"{mark!r} is no mark of a CUDA stream")
        self._stream.wait_event(mark.event)

    def mark(self) -> CudaMark:
        """See `Stream.mark`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaMark(event)


class CudaMark:
    """See `Mark`."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """See `Mark.wait`."""
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark.seconds_since`."""
        if not isinstance(earlier, CudaMark):
            raise TypeError(f"{earlier!r} is no mark of a CUDA stream")
        self.event.synchronize()
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1e3


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the accelerator that a parameter on `device` is updated with; None for the CPU."""
    return None if device.type == "cpu" else CudaAccelerator(device)
