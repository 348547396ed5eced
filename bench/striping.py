"""NVMe steps over two directories of unequal speed: are both of them busy all the time?

    python -m tierstep.bench.striping --nvme DIR [--params 200e6] [--rates 1.5e9 0.5e9]

Both directories are folders of DIR, whose drive has to be faster than the rates given: a throttle gives each of them a
speed of its own, at which its transfers end one after the other. The limit is the time that the bytes of a step need at
both rates together; beside it, what records dealt out equally reach. The last line is one JSON object with all raw
samples; bench/results/ keeps it.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import torch

from tierstep import AdamW, Tiers
from tierstep.bench.contestants import median, numbers
from tierstep.bench.provenance import publish
from tierstep.io.requests import Completion, Request
from tierstep.io.threads import ThreadBackend

SUBGROUP_BYTES = 16 << 20
SLOTS = 12


class ThrottledBackend(ThreadBackend):
    """A thread backend whose transfers in a directory end no faster than its rate allows, in order."""

    def __init__(self, rates: dict[str, float]) -> None:
        super().__init__()
        self._lines = {name: SimpleQueue[tuple[float, Completion, Completion] | None]() for name in rates}
        self._threads = [
            threading.Thread(target=self._release, args=(self._lines[name], rate), daemon=True)
            for name, rate in rates.items()
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> Completion:
        """Start a transfer; its completion ends when the transfer has, and the directory's line has come to it."""
        outer = Completion(request, self.timeout_s)
        self._lines[request.path.parent.parent.name].put((time.perf_counter(), super().submit(request), outer))
        return outer

    def close(self) -> None:
        """End the lines, then what is below."""
        for line in self._lines.values():
            line.put(None)
        for thread in self._threads:
            thread.join()
        super().close()

    @staticmethod
    def _release(line: SimpleQueue[tuple[float, Completion, Completion] | None], rate: float) -> None:
        free_at = 0.0
        while (item := line.get()) is not None:
            submitted, inner, outer = item
            free_at = max(free_at, submitted) + inner.request.buffer.nbytes / rate
            time.sleep(max(0.0, free_at - time.perf_counter()))
            try:
                inner.wait()
            finally:
                outer.finish(inner.error)


def main() -> None:
    """Run the benchmark."""
    options = _options()
    rates = dict(zip(("a", "b"), options.rates, strict=True))
    result: dict[str, Any] = {"params": int(options.params), "rates": options.rates, "records": SUBGROUP_BYTES}
    for name, equal in (("by measured rate", False), ("equally", True)):
        samples, moved = _steps(options, rates, equal=equal)
        limit = moved / sum(options.rates)
        result[name] = {"seconds": samples, "moved_bytes": moved, "limit_seconds": limit}
        print(f"{name:18} step {median(samples):.3f} s, limit {limit:.3f} s: {limit / median(samples):.0%}")
    publish("striping", result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="steps over two directories of unequal speed")
    parser.add_argument("--params", type=float, default=200e6)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rates", type=float, nargs=2, default=[1.5e9, 0.5e9], help="bytes per second")
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on a fast drive")
    return parser.parse_args()


def _steps(options: argparse.Namespace, rates: dict[str, float], *, equal: bool) -> tuple[list[float], int]:
    with _directories(options.nvme, rates) as folders, _throttled(rates, equal=equal):
        tiers = Tiers(gpu=0, ram=SLOTS * (SUBGROUP_BYTES + 4096), nvme=folders, subgroup=SUBGROUP_BYTES, slots=SLOTS)
        parameter = torch.nn.Parameter(numbers(int(options.params), torch.bfloat16))
        parameter.grad = numbers(int(options.params), torch.bfloat16)
        samples, moved = [], 0
        with AdamW([parameter], tiers=tiers) as optimizer:
            for _ in range(3 + options.repeats):
                before, start = sum(optimizer.moved_bytes().values()), time.perf_counter()
                optimizer.step()
                samples.append(time.perf_counter() - start)
                moved = sum(optimizer.moved_bytes().values()) - before
    return samples[3:], moved


@contextmanager
def _directories(parent: Path, rates: dict[str, float]) -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        folders = [Path(folder) / name for name in rates]
        for each in folders:
            each.mkdir()
        yield folders


@contextmanager
def _throttled(rates: dict[str, float], *, equal: bool) -> Iterator[None]:
    with patch("tierstep.tiers.build.open_backend", lambda *_, **__: ThrottledBackend(rates)):
        if not equal:
            yield
            return
        with patch("tierstep.tiers.build.measure_rates", lambda _, folders: [1.0] * len(folders)):
            yield


if __name__ == "__main__":
    main()
