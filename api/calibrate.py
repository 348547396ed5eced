"""`tierstep calibrate`: which I/O engine suits some directories best, kept for `backend = "auto"`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tierstep.configs.sizes import format_bytes
from tierstep.errors import ConfigError
from tierstep.io.calibration import Sweep, sweep
from tierstep.io.directories import require_directory
from tierstep.io.engines import Engine, keep_calibration
from tierstep.tiers.build import as_tensor

SHOWN = 8


@dataclass(frozen=True)
class Calibrated:
    """What was measured for which directories, and the file that keeps it."""

    directories: tuple[Path, ...]
    found: Sweep
    kept_in: Path


def calibrate(directories: Sequence[Path], *, seconds: float, console: Console) -> Calibrated:
    """Measure the engines for directories that are used together, and keep the best. Shows a progress bar. Blocks.

    Raises `ConfigError` for a directory that cannot be used or is named twice, `DiskFull` and `TransferError`.
    """
    checked = tuple(require_directory(path) for path in directories)
    if len({path.resolve() for path in checked}) < len(checked):
        raise ConfigError(f"--nvme names a directory twice ({', '.join(map(str, checked))}): name each once")
    columns = (TextColumn("calibrating"), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def advance(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        found = sweep(checked, seconds=seconds, as_tensor=as_tensor, on_progress=advance)
    return Calibrated(checked, found, keep_calibration(checked, found.best))


def calibration_values(calibrated: Calibrated) -> dict[str, Any]:
    """Return what `tierstep calibrate --json` prints; rates in bytes a second."""
    found = calibrated.found
    return {
        "command": "calibrate",
        "directories": [str(path) for path in calibrated.directories],
        **dataclasses.asdict(found.best),
        "samples": [{**dataclasses.asdict(engine), "rates": rates} for engine, rates in found.samples.items()],
        "moved_bytes": found.moved_bytes,
        "kept_in": str(calibrated.kept_in),
    }


def show_calibration(console: Console, calibrated: Calibrated) -> None:
    """Show the fastest engines and the one that is taken from now on."""
    found, best = calibrated.found, calibrated.found.best
    table = Table(title="reads and writes at once", title_justify="left", title_style="bold")
    table.add_column("engine")
    table.add_column("GB/s, each round", justify="right")
    ranked = sorted(found.samples.items(), key=lambda item: (-len(item[1]), -sum(item[1])))
    for engine, rates in ranked[:SHOWN]:
        table.add_row(str(engine), "  ".join(f"{rate / 1e9:.2f}" for rate in rates))
    console.print(table)
    kind = "the default, which nothing clearly beat" if best.engine == Engine() else "measured best"
    console.out(f'backend = "auto" takes {best.engine} here: {kind}', highlight=False)
    console.out(
        f"mixed {best.mixed_rate / 1e9:.2f}, read alone {best.read_rate / 1e9:.2f}, "
        f"write alone {best.write_rate / 1e9:.2f} GB/s; {format_bytes(found.moved_bytes)} moved; "
        f"kept in {calibrated.kept_in}",
        highlight=False,
    )
