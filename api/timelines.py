"""Keeping timelines of some steps of a run as files."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from tierstep.errors import ConfigError
from tierstep.observer import RunStart, StepEvent
from tierstep.results import TrainResult


class TimelineFiles:
    """An observer that writes DIR/step-00000012.json and .png for the steps asked for, or for the last one of the run.

    Raises `ConfigError` when the directory cannot be made, and where Pillow is not installed, before anything starts.
    """

    def __init__(self, directory: Path, steps: Collection[int]) -> None:
        self._directory = directory
        self._steps = steps
        self._last: StepEvent | None = None
        if find_spec("PIL") is None:
            raise ConfigError("--trace draws with Pillow, which is not installed: pip install 'tierstep[timeline]'")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--trace {directory} cannot be made: {error.strerror}; name another folder") from error

    def on_start(self, start: RunStart) -> None:
        """See `Observer`."""

    def on_step(self, event: StepEvent) -> None:
        """See `Observer`."""
        self._last = event
        if event.step in self._steps:
            self._write(event)

    def on_end(self, result: TrainResult) -> None:
        """See `Observer`."""
        if not self._steps and self._last is not None:
            self._write(self._last)

    def _write(self, event: StepEvent) -> None:
        path = self._directory / f"step-{event.step:08d}"
        event.timeline.save_json(path.with_suffix(".json"))
        event.timeline.save_png(path.with_suffix(".png"), f"step {event.step}: {event.timeline.seconds * 1e3:,.0f} ms")
