"""Signals that are only noted, so that the work under way can be finished first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

from tierstep.errors import ConfigError


class SignalFlag:
    """From `install` (or the start of its `with` block) until `close`, these signals only set `received`.

    A second SIGINT acts as before, so that Ctrl-C twice ends at once; other signals are noted as often as they come,
    because launchers tend to send them twice. A forked child does what it would have done without the flag. `close`
    puts the former handlers back. Handlers belong to the main thread: elsewhere `install` raises `ConfigError`.
    """

    def __init__(self, *numbers: int) -> None:
        self.received: int | None = None
        self._numbers = numbers
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def install(self) -> None:
        """Begin to note. Raises `ConfigError` for a signal that cannot be caught, and outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("signals are handled in the main thread only: call this there, or leave on_signal out")
        try:
            for number in self._numbers:
                self._previous[number] = signal.signal(number, self._note)
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise ConfigError(f"on_signal={number!r} cannot be caught ({error}): give one such as SIGTERM") from error

    def close(self) -> None:
        """Put back what the signals did before. May be called twice."""
        for number in list(self._previous):
            self._put_back(number)

    def __enter__(self) -> SignalFlag:
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child: its work is not ours to finish
            self._put_back(number)
            os.kill(os.getpid(), number)
            return
        self.received = number
        if number == signal.SIGINT:
            self._put_back(number)

    def _put_back(self, number: int) -> None:
        handler = self._previous.pop(number)
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python


def as_numbers(on_signal: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the signals that a setting names. Raises `ConfigError` for what is no signal."""
    found = () if on_signal is None else tuple(on_signal) if isinstance(on_signal, Iterable) else (on_signal,)
    for number in found:
        if not isinstance(number, int) or isinstance(number, bool) or number not in set(signal.Signals):
            raise ConfigError(f"on_signal={number!r} is no signal: give one such as signal.SIGTERM")
    return found
