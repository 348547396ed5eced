"""Faults that tests put into `MemoryBackend`: each says what one operation meets instead of success."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["allocate", "remove", "link", "link_count", "read", "write"]


@dataclass(frozen=True)
class Operation:
    """One call of the backend, as faults and tests see it. `index` counts all calls of one backend from 0."""

    index: int
    kind: Kind
    path: Path
    offset: int = 0
    nbytes: int = 0


class Fault:
    """What happens to an operation instead of success; this one does nothing.

    Faults keep no state of an operation, so that one fault may hit several.
    """

    def strike(self, attempt: int) -> None:
        """Raise what the `attempt`-th try (from 0) of the operation meets; called before any byte moves."""

    def moved_bytes(self, nbytes: int) -> int:
        """Return how many of `nbytes` the operation moves before it stops."""
        return nbytes

    def defer(self, finish: Callable[[], None]) -> bool:
        """Return True to take over calling `finish`, which does the operation; False to have it done at once."""
        return False


class Fail(Fault):
    """The system answers with `code`, such as `errno.EIO`, and moves nothing."""

    def __init__(self, code: int) -> None:
        self.code = code

    def strike(self, attempt: int) -> None:
        """See `Fault.strike`."""
        raise OSError(self.code, os.strerror(self.code))


class Interrupt(Fault):
    """The first `times` tries of the operation are interrupted by a signal (EINTR) or told to come again (EAGAIN)."""

    def __init__(self, times: int, code: int = errno.EINTR) -> None:
        self.times = times
        self.code = code

    def strike(self, attempt: int) -> None:
        """See `Fault.strike`."""
        if attempt < self.times:
            raise OSError(self.code, os.strerror(self.code))


class Short(Fault):
    """Only the first `nbytes` bytes move, and then no more."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def moved_bytes(self, nbytes: int) -> int:
        """See `Fault.moved_bytes`."""
        return min(nbytes, self.nbytes)


class Hold(Fault):
    """Transfers wait until `release`, which does those held so far, in order, on the thread that calls it.

    Without a `release` they never complete. What is submitted after it is not held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[Callable[[], None]] = []
        self._released = False

    @property
    def held_count(self) -> int:
        """How many transfers are waiting."""
        return len(self._held)

    def defer(self, finish: Callable[[], None]) -> bool:
        """See `Fault.defer`."""
        with self._lock:
            if not self._released:
                self._held.append(finish)
            return not self._released

    def release(self) -> None:
        """Let everything through."""
        with self._lock:
            self._released = True
            held, self._held = self._held, []
        for finish in held:
            finish()
