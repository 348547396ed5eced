"""What a layer above asks of an I/O backend, and the handle that it gets back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tierstep.errors import ConfigError, TransferTimeout

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Read:
    """Fill the whole of `buffer` (writable, C-contiguous) from `path`, starting at byte `offset`.

    Raises `ConfigError` when `buffer` or `offset` cannot be used.
    """

    path: Path
    offset: int
    buffer: memoryview

    def __post_init__(self) -> None:
        _check(self)
        if self.buffer.readonly:
            raise ConfigError(f"{self}: the buffer is read-only; pass writable memory")

    def __str__(self) -> str:
        """Name the operation as error messages do."""
        return f"read of {self.buffer.nbytes} bytes at {self.offset} from {self.path}"


@dataclass(frozen=True)
class Write:
    """Write the whole of `buffer` (C-contiguous) into `path`, starting at byte `offset`.

    A file that does not exist is made; one that is longer keeps its length. Raises `ConfigError` when `buffer` or
    `offset` cannot be used.
    """

    path: Path
    offset: int
    buffer: memoryview

    def __post_init__(self) -> None:
        _check(self)

    def __str__(self) -> str:
        """Name the operation as error messages do."""
        return f"write of {self.buffer.nbytes} bytes at {self.offset} to {self.path}"


Request = Read | Write


class Completion:
    """The outcome of one request. Made by a backend, which calls `finish` exactly once; any thread may wait.

    The request's buffer belongs to the backend until `done()`; it may be neither changed nor freed before,
    also after a `TransferTimeout`, since the operation is still under way then.
    """

    def __init__(self, request: Request, timeout_s: float) -> None:
        self.request = request
        self.timeout_s = timeout_s
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Completion], None]] = []

    def done(self) -> bool:
        """Say whether the operation has ended, well or badly. Never blocks."""
        return self._finished.is_set()

    @property
    def error(self) -> BaseException | None:
        """What went wrong, once `done()`; None while the operation runs or when it ended well."""
        return self._error

    def wait(self) -> None:
        """Block until the operation ends; raise what went wrong. May be called again with the same outcome.

        Raises `TransferTimeout` when it has not ended within `timeout_s` seconds of this call.
        """
        if not self._finished.wait(self.timeout_s):
            raise self.timeout()
        if self._error is not None:
            raise self._error

    def timeout(self) -> TransferTimeout:
        """Return the error that names this operation as one that takes too long."""
        message = f"{self.request} has not completed within {self.timeout_s:g} s; is the drive still there?"
        return TransferTimeout(message, path=self.request.path)

    def add_done_callback(self, callback: Callable[[Completion], None]) -> None:
        """Call `callback(self)` when the operation ends (at once if it has), on the thread that ends it.

        A callback neither blocks nor raises: it runs on a thread that has other transfers to do. One that raises all
        the same is logged with its traceback, and the others are still called.
        """
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, error: BaseException | None = None) -> None:
        """End the operation (backends only)."""
        with self._lock:
            self._error = error
            self._finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _logger.exception("a callback after the %s failed", self.request)


def _check(request: Request) -> None:
    if request.offset < 0:
        raise ConfigError(f"{request}: the offset is negative; files start at 0")
    if not request.buffer.c_contiguous:
        raise ConfigError(f"{request}: the buffer has gaps; pass C-contiguous memory")
