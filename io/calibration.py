"""Measuring which engine keeps some directories busiest: reads and writes at once, as a training step makes them."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from tierstep.errors import ConfigError
from tierstep.io.backend import IoBackend
from tierstep.io.buffers import PageBuffer
from tierstep.io.engines import Calibration, Engine, candidates
from tierstep.io.requests import Completion, Read, Request, Write
from tierstep.io.scratch import open_scratch
from tierstep.io.selection import open_engine

FILE_BYTES = 32 << 20  # as a record of the default size
FILES = 4  # of each kind in each directory: as many reads and as many writes are under way
FINALISTS = 4
FINAL_ROUNDS = 3
WORTH_A_CHANGE = 1.03  # below that a difference is noise

AsTensor = Callable[[memoryview], object]
OnProgress = Callable[[int, int, str], None]  # measurements made, measurements in all, what is measured now


@dataclass(frozen=True)
class Sweep:
    """What `sweep` found: the engine to use, and each engine's rates (bytes a second, mixed), one a round."""

    best: Calibration
    samples: Mapping[Engine, list[float]]
    moved_bytes: int


def sweep(
    directories: Sequence[Path],
    *,
    seconds: float = 6.0,
    file_bytes: int = FILE_BYTES,
    as_tensor: AsTensor | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> Sweep:
    """Measure all engines for these directories together. Blocks for about `seconds`, longer on a slow drive.

    Takes memory and space for eight files of `file_bytes` in each directory; nothing of it is left. A first round
    measures every engine, as far as the time allows; the best of it and the one without calibration then take turns.
    Raises `ConfigError` for a directory that cannot be used, `DiskFull` and `TransferError`.
    """
    if not directories:
        raise ConfigError("there is no directory to measure: pass --nvme DIR")
    engines = candidates()
    total = len(engines) + FINAL_ROUNDS * FINALISTS + 2
    slice_seconds = seconds / total
    with ExitStack() as resources:
        load = _Load(directories, file_bytes, as_tensor, resources)
        samples: dict[Engine, list[float]] = {}
        deadline = time.perf_counter() + 2 * seconds  # engines that nobody got to are left out
        for done, engine in enumerate(engines):
            if samples and time.perf_counter() > deadline:
                break
            on_progress(done, total, str(engine))
            samples[engine] = [load.rate(engine, load.mixed, slice_seconds)]
        finalists = _finalists(samples)
        turns = list(itertools.product(range(FINAL_ROUNDS), finalists))
        for done, (_, engine) in enumerate(turns, start=len(engines)):
            on_progress(done, total, str(engine))
            samples[engine].append(load.rate(engine, load.mixed, slice_seconds))
        best = decide({engine: samples[engine][1:] for engine in finalists})
        on_progress(total - 2, total, "reads alone, writes alone")
        alone = [load.rate(best, kind, slice_seconds) for kind in (load.reads, load.writes)]
    on_progress(total, total, str(best))
    day = datetime.now(timezone.utc).date().isoformat()
    mixed, default = (statistics.median(samples[engine][1:]) for engine in (best, Engine()))
    return Sweep(Calibration(best, mixed, alone[0], alone[1], default, day), samples, load.moved_bytes)


def decide(samples: Mapping[Engine, Sequence[float]]) -> Engine:
    """Return the engine with the best median rate; the one without calibration unless that is clearly slower."""
    rates = {engine: statistics.median(values) for engine, values in samples.items()}
    best = max(rates, key=lambda engine: rates[engine])
    return best if rates[best] > WORTH_A_CHANGE * rates[Engine()] else Engine()


def _finalists(samples: Mapping[Engine, Sequence[float]]) -> list[Engine]:
    """Return the best engines of the first round; the one without calibration is always among them."""
    ranked = sorted(samples, key=lambda engine: -max(samples[engine]))
    return [Engine(), *[engine for engine in ranked if engine != Engine()][: FINALISTS - 1]]


class _Load:
    """Files in each directory, memory for them, and requests that read one half of them and overwrite the other."""

    def __init__(
        self, directories: Sequence[Path], file_bytes: int, as_tensor: AsTensor | None, resources: ExitStack
    ) -> None:
        self.moved_bytes = 0
        self._as_tensor = as_tensor
        self.reads: list[Request] = []
        self.writes: list[Request] = []
        folders = [resources.enter_context(open_scratch(directory)).path for directory in directories]
        content = os.urandom(file_bytes)  # some drives compress
        with open_engine(Engine()) as backend:
            for path in [folder / f"file-{number}" for number in range(2 * FILES) for folder in folders]:
                memory = resources.enter_context(PageBuffer(file_bytes)).view
                memory[:] = content
                backend.allocate(path, file_bytes)
                backend.submit(Write(path, 0, memory)).wait()
                self.moved_bytes += file_bytes
                if len(self.reads) < FILES * len(folders):
                    self.reads.append(Read(path, 0, memory))
                else:
                    self.writes.append(Write(path, 0, memory))
        self.mixed = [request for pair in zip(self.reads, self.writes, strict=True) for request in pair]

    def rate(self, engine: Engine, requests: Sequence[Request], seconds: float) -> float:
        """Return the bytes per second of the requests, again and again for so long, each at least once."""
        with open_engine(engine, as_tensor=self._as_tensor) as backend:
            start = time.perf_counter()
            moved = sum(_moved(backend, requests, lambda: time.perf_counter() - start < seconds))
            taken = time.perf_counter() - start
        self.moved_bytes += moved
        return moved / taken


def _moved(backend: IoBackend, requests: Sequence[Request], more: Callable[[], bool]) -> Iterator[int]:
    """Keep every request under way until there is to be no more; yield the bytes of each that ended well."""
    waiting: list[Completion] = [backend.submit(request) for request in requests]
    while waiting:
        completion = waiting.pop(0)
        completion.wait()
        yield completion.request.buffer.nbytes
        if more():
            waiting.append(backend.submit(completion.request))
