"""Ending a run on SIGINT or SIGTERM, after the step under way."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Within its `with` block the first SIGINT or SIGTERM only sets `received`; a second one acts as before.

    The handlers that were there come back at the end of the block, or after the first signal. Outside the main
    thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
