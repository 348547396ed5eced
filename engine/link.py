"""The link between host memory and a GPU, and how fast it is: one way, both ways, and beside work of the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from tierstep.engine.accelerator import Accelerator, Mark, Stream
from tierstep.tiers.slots import Arena

BLOCK_BYTES = 64 << 20
TRANSFERS = 12


class Link:
    """Transfers between pinned memory and a GPU, on a stream each way."""

    def __init__(self, accelerator: Accelerator, resources: ExitStack) -> None:
        self._up, self._down = accelerator.stream(), accelerator.stream()
        arena = Arena(2 * BLOCK_BYTES, pinned=accelerator.device.type == "cuda")
        resources.callback(arena.close)
        self._outside, self._inside = (arena.cut(BLOCK_BYTES)[0] for _ in range(2))
        self._there = torch.zeros(2, BLOCK_BYTES, dtype=torch.uint8, device=accelerator.device)
        for stream in (self._up, self._down):
            stream.after(accelerator.caller().mark())
        self._transfer([self._up, self._down])  # touches the memory

    def rates(self) -> tuple[float, float, float]:
        """Return the bytes a second up alone, down alone, and each way when both go on. Blocks."""
        return self._rate([self._up]), self._rate([self._down]), self._rate([self._up, self._down])

    def beside(self, work: Callable[[], None], count: int, nbytes: int) -> float:
        """Return the bytes a second of host memory while `work`, which moves `nbytes`, goes on beside transfers both
        ways, `count` times. There are twice as many bytes to transfer each way, so that transfers outlast the work.
        Blocks."""
        transfers = 2 * count * nbytes // BLOCK_BYTES + 1
        start, marks = time.perf_counter(), self._transfer([self._up, self._down], transfers)
        for _ in range(count):
            work()
        seconds = time.perf_counter() - start
        passed = [[mark.seconds_since(passed[0]) for mark in passed] for passed in marks]
        moved = sum(_reached(times, seconds) for times in passed) * BLOCK_BYTES
        return (count * nbytes + moved) / seconds

    def _rate(self, streams: Sequence[Stream]) -> float:
        marks = self._transfer(streams)
        return TRANSFERS * BLOCK_BYTES / max(passed[-1].seconds_since(passed[0]) for passed in marks)

    def _transfer(self, streams: Sequence[Stream], count: int = TRANSFERS) -> list[list[Mark]]:
        """Begin transfers; return the marks before, between and after those of each stream."""
        marks = [[stream.mark()] for stream in streams]
        for _ in range(count):
            for stream, passed in zip(streams, marks, strict=True):
                stream.run(self._move_up if stream is self._up else self._move_down)
                passed.append(stream.mark())
        return marks

    def _move_up(self) -> None:
        self._there[0].copy_(self._outside, non_blocking=True)

    def _move_down(self) -> None:
        self._inside.copy_(self._there[1], non_blocking=True)


def _reached(times: Sequence[float], seconds: float) -> float:
    """Return how many transfers were through after so many seconds, the one under way counted in part."""
    whole = sum(time <= seconds for time in times[1:])
    if whole == len(times) - 1:
        return float(whole)
    return whole + (seconds - times[whole]) / (times[whole + 1] - times[whole])
