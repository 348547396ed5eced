"""Locks that belong to a process and vanish with it, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from tierstep.errors import CheckpointError

LOCK_NAME = ".tierstep-lock"


class DirectoryLock:
    """Exclusive work on a directory, across processes, for the length of a `with` block. Never waits.

    The lock is an flock on a file that stays in the directory; the kernel drops it when its holder dies, so there are
    no stale locks.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._descriptor: int | None = None

    def __enter__(self) -> DirectoryLock:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"{self._path.parent} is in use by another run or save: wait for it, or use another directory"
            ) from error
        self._descriptor = descriptor
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
