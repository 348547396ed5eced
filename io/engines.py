"""The ways in which a drive can be kept busy, and the one that was measured best for some directories."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstep.io import extension, ring
from tierstep.io.calibration_cache import read_section, write_entry
from tierstep.io.drives import drives_of
from tierstep.io.guards import BLOCK_BYTES as LIBAIO_BLOCK_BYTES
from tierstep.io.libaio import HANDLES, QUEUE_DEPTH
from tierstep.io.threads import DEFAULT_BLOCK_BYTES, DEFAULT_THREADS

SECTION = "io-engines"
MIB = 1 << 20
MOST_UNDER_WAY_BYTES = 128 * MIB
FIELDS = {"backend": str, "threads": int, "depth": int, "block_bytes": int}


@dataclass(frozen=True)
class Engine:
    """A backend and its numbers: each of `threads` threads has `depth` blocks of `block_bytes` under way."""

    backend: str = "threads"
    threads: int = DEFAULT_THREADS
    depth: int = 1
    block_bytes: int = DEFAULT_BLOCK_BYTES

    def __str__(self) -> str:
        """Name it as people compare it."""
        each = "" if self.depth == 1 else f" x {self.depth}"
        return f"{self.backend}, {self.threads}{each} x {self.block_bytes / MIB:g} MiB"


@dataclass(frozen=True)
class Choice:
    """What `backend="auto"` takes, and why."""

    engine: Engine
    reason: str


@dataclass(frozen=True)
class Calibration:
    """A measured engine: file bytes a second, reads and writes together, reads alone and writes alone.

    `default_rate` is what the engine without calibration reached in the same minute; `day` as YYYY-MM-DD.
    """

    engine: Engine
    mixed_rate: float
    read_rate: float
    write_rate: float
    default_rate: float
    day: str


def candidates() -> list[Engine]:
    """Return the engines that are worth measuring on this machine, the one without calibration first."""
    found = [Engine("threads", n, 1, b * MIB) for n in (2, 4, 8, 16) for b in (1, 4, 16)]
    if ring.why_unavailable() is None:
        found += [Engine("uring", n, d, b * MIB) for n in (1, 2, 4) for d in (4, 8, 16) for b in (1, 4)]
    fitting = [e for e in found if 4 * MIB <= e.threads * e.depth * e.block_bytes <= MOST_UNDER_WAY_BYTES]
    if extension.why_unavailable() is None:
        fitting.append(Engine("libaio", HANDLES, QUEUE_DEPTH, LIBAIO_BLOCK_BYTES))
    return [Engine(), *(engine for engine in fitting if engine != Engine())]


def keep_calibration(directories: Sequence[Path], found: Calibration) -> Path:
    """Have `choose_engine` know what was measured for these directories; return the cache's path. Blocks.

    Raises as `write_entry` does.
    """
    return write_entry(SECTION, drives_of(directories), dataclasses.asdict(found))


def choose_engine(directories: Sequence[Path]) -> Choice:
    """Return the engine that was measured best for these directories together, or the one for all machines.

    Raises `OSError` when a directory does not exist.
    """
    entry = read_section(SECTION).get(drives_of(directories)) if directories else None
    engine = None if entry is None else _engine_of(entry)
    if entry is None or engine is None:
        return Choice(Engine(), "not measured for these directories: run tierstep calibrate --nvme DIR")
    missing = _why_unavailable(engine.backend)
    if missing is not None:
        return Choice(Engine(), f"{engine} was measured best, but {missing}")
    if engine == Engine():
        return Choice(engine, f"measured on {entry.get('day')}: no other was clearly faster")
    gigabytes = f"{entry.get('mixed_rate', 0) / 1e9:.2f} GB/s, against {entry.get('default_rate', 0) / 1e9:.2f}"
    return Choice(engine, f"measured best on {entry.get('day')}: {gigabytes} of {Engine()}")


def _engine_of(entry: Mapping[str, Any]) -> Engine | None:
    """Return the engine of an entry; None where it is not one, since a cache may hold anything."""
    values = entry.get("engine")
    if not isinstance(values, dict) or {key: type(value) for key, value in values.items()} != FIELDS:
        return None
    if not all(isinstance(entry.get(rate), float) for rate in ("mixed_rate", "default_rate")):
        return None
    engine = Engine(**values)
    usable = min(engine.threads, engine.depth, engine.block_bytes) > 0 and engine.block_bytes % MIB == 0
    return engine if usable and engine.backend in ("threads", "uring", "libaio") else None


def _why_unavailable(backend: str) -> str | None:
    reasons = {"uring": ring.why_unavailable, "libaio": extension.why_unavailable}
    return reasons[backend]() if backend in reasons else None
