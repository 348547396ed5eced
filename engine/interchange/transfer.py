"""What goes with every export and import: how far it is, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OnProgress = Callable[[int, int], None]  # bytes done, bytes in total


@dataclass(frozen=True)
class Exported:
    """What an export wrote. `without_weights` are trained parameters of which the checkpoint holds no weight."""

    path: Path
    nbytes: int
    without_weights: tuple[str, ...]


class Meter:
    """Counts bytes done out of a total that may grow."""

    def __init__(self, total: int, on_progress: OnProgress) -> None:
        self._done, self._total, self._on_progress = 0, total, on_progress

    def expect(self, nbytes: int) -> None:
        """Add to the total."""
        self._total += nbytes

    def add(self, nbytes: int) -> None:
        """Note that so many bytes more are done."""
        self._done += nbytes
        self._on_progress(self._done, self._total)
