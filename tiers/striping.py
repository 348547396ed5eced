"""Which directory holds which record, so that all of them are busy for the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tierstep.errors import DiskFull
from tierstep.io.backend import IoBackend
from tierstep.io.requests import Read, Write
from tierstep.tiers.slots import Arena

PROBE_BYTES = 16 << 20
PROBE_FILES = 2  # of each kind: what is read and what is written at once
PROBE_SECONDS = 0.2  # per directory; a slow one takes as long as its first round does


class Striping:
    """Deals records out to directories in proportion to their `rates`, evenly from the first to the last.

    Of any run of records, each directory gets its share, give or take one. Pure.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        total = sum(rates)
        self._shares = [rate / total for rate in rates]
        self._credits = [0.0] * len(rates)

    def order(self) -> list[int]:
        """Return the directories for the next record, the one whose turn it is first."""
        owed = [credit + share for credit, share in zip(self._credits, self._shares, strict=True)]
        return sorted(range(len(owed)), key=lambda place: -owed[place])

    def took(self, place: int) -> None:
        """Count the next record for a directory."""
        self._credits = [credit + share for credit, share in zip(self._credits, self._shares, strict=True)]
        self._credits[place] -= 1


def measure_rates(backend: IoBackend, directories: Sequence[Path]) -> list[float]:
    """Return the bytes per second that each directory reads and writes at once. Blocks, for parts of a second each.

    Where there is nothing to choose, or a directory has no room for the probe, all rates are 1. The probe's files are
    removed again.
    """
    if len(directories) > 1:
        memory = Arena(2 * PROBE_FILES * PROBE_BYTES).cut(2 * PROBE_FILES * PROBE_BYTES)[1]
        with suppress(DiskFull):
            return [_rate(backend, directory, memory) for directory in directories]
    return [1.0] * len(directories)


def _rate(backend: IoBackend, directory: Path, memory: memoryview) -> float:
    paths = [directory / f"probe-{number}" for number in range(2 * PROBE_FILES)]
    parts = [memory[number * PROBE_BYTES : (number + 1) * PROBE_BYTES] for number in range(len(paths))]
    requests = [
        Read(path, 0, part) if number < PROBE_FILES else Write(path, 0, part)
        for number, (path, part) in enumerate(zip(paths, parts, strict=True))
    ]
    try:
        for path, part in zip(paths, parts, strict=True):
            backend.allocate(path, PROBE_BYTES)
            backend.submit(Write(path, 0, part)).wait()
        moved, start = 0, time.perf_counter()
        while moved == 0 or time.perf_counter() - start < PROBE_SECONDS:
            for completion in [backend.submit(request) for request in requests]:
                completion.wait()
            moved += len(paths) * PROBE_BYTES
        return moved / (time.perf_counter() - start)
    finally:
        for path in paths:
            backend.remove(path)
