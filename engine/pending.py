"""The handle of a save that goes on in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

LOGGER = logging.getLogger("tierstep")


class PendingSave:
    """The handle of a save that goes on in the background. Any thread may ask."""

    def __init__(self, finish: Callable[[], Path]) -> None:
        self._finish = finish
        self._path: Path | None = None
        self._error: BaseException | None = None
        self.error_was_raised = False
        self._thread = threading.Thread(target=self._run, name="tierstep-save")
        self._thread.start()

    def done(self) -> bool:
        """Say whether the save has ended, well or badly. Never blocks."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Block until the save has ended, well or badly; raise nothing."""
        self._thread.join()

    def wait(self) -> Path:
        """Block until the checkpoint is complete and return its path; raise what went wrong, as often as asked."""
        self.join()
        if self._error is not None:
            self.error_was_raised = True
            raise self._error
        if self._path is None:
            raise ValueError("a save ended without an outcome")
        return self._path

    def _run(self) -> None:
        try:
            self._path = self._finish()
        except BaseException as error:  # noqa: BLE001 - it appears in `wait`
            self._error = error
            LOGGER.error("a checkpoint was not saved: %s", error)  # for whoever never waits
