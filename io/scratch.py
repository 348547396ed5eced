"""A directory of one optimizer's own for its slot files, that does not outlive its process for long.

Layout of `<directory>/tierstep-scratch-<random>/`: a file `owner.lock`, locked with flock for as long as the owner
lives, and whatever the owner puts there. The kernel drops the lock however the owner ends, so a lock that can be taken
means a dead owner, without guessing from process numbers (which are reused, and differ between containers).

The lock file is there before anything else is, and goes last, on the drive as well (fsync): so whatever a crash or a
power loss leaves of the directory either has the lock file or is empty, and is known for ours.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType

from tierstep.errors import ConfigError
from tierstep.io.directories import require_directory
from tierstep.io.durable import fsync_directory

PREFIX = "tierstep-scratch-"
LOCK_NAME = "owner.lock"


class Scratch:
    """An own, empty directory at `path`. `close` removes it; after a crash the next `open_scratch` does.

    A forked child shares the lock but owns nothing: its `close` removes nothing. While it runs the directory counts
    as used, even when the parent is dead.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        self._pid = os.getpid()

    def close(self) -> None:
        """Remove the directory and all that is in it. May be called again."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        try:
            if os.getpid() == self._pid:
                _remove(self.path)
        finally:
            # Closing is enough, and no more than right: unlocking would take the lock from the parent of a fork too.
            os.close(lock)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_scratch(directory: Path | str) -> Scratch:
    """Remove the scratch directories of dead processes from `directory`, and make a new one there. Blocks.

    Any number of processes and optimizers may share `directory`. Whatever was not made here is left alone. Raises
    `ConfigError` when `directory` is missing, not writable, or its file system has no locks.
    """
    parent = require_directory(directory)
    try:
        remove_abandoned(parent)
        while True:
            scratch = _try_make(parent / f"{PREFIX}{secrets.token_hex(8)}")
            if scratch is not None:
                return scratch
    except OSError as error:
        raise ConfigError(
            f"directory {parent} cannot hold slot files: {error.strerror}: use a local file system with locks, or "
            "another directory"
        ) from error


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the scratch directories whose owners are dead; return them. Symbolic links are not followed."""
    with os.scandir(parent) as entries:
        found = [Path(e.path) for e in entries if e.name.startswith(PREFIX) and e.is_dir(follow_symlinks=False)]
    return [path for path in found if _remove_if_abandoned(path)]


def _try_make(path: Path) -> Scratch | None:
    """Make and lock a new directory; return None when a cleaner got in between.

    Process A makes the directory, then the lock file, then takes the lock. Until the file exists, cleaner B can
    remove the empty directory. Between the file and the lock, B can take the lock first and removes what it must
    think abandoned: A then finds the directory gone, or the lock taken, or takes it on a file that has no name any
    more. Therefore A looks at all three and starts anew under another name; nothing is lost, since A had not put
    anything there yet.
    """
    path.mkdir(mode=0o700)
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        locked = _lock(lock)
        if locked:
            fsync_directory(path)
    except OSError:
        os.close(lock)
        _remove(path)
        raise
    if not locked:
        os.close(lock)
        return None
    os.write(lock, f"tierstep scratch directory of process {os.getpid()}\n".encode())
    return Scratch(path, lock)


def _remove_if_abandoned(path: Path) -> bool:
    """Remove `path` if it is empty, or has a lock file and nobody holds the lock; say whether it was removed.

    One that cannot be removed is in nobody's way: it is left to whoever comes next.
    """
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _remove_if_empty(path)
    except OSError:  # foreign, or another user's
        return False
    try:
        if not _lock(lock):
            return False
        _remove(path)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def _remove_if_empty(path: Path) -> bool:
    """Remove what is left of a directory whose owner died before the lock file was there, or after it was gone."""
    try:
        path.rmdir()
    except OSError:  # foreign, or gone
        return False
    return True


def _lock(descriptor: int) -> bool:
    """Take the lock if it is free and its file still has a name; never wait."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def _remove(path: Path) -> None:
    """Remove a scratch directory whose lock is held; the lock file goes last, so that a crash half-way is resumed."""
    try:
        with os.scandir(path) as entries:
            contents = [(e.path, e.is_dir(follow_symlinks=False)) for e in entries if e.name != LOCK_NAME]
    except FileNotFoundError:
        return
    for name, is_directory in contents:
        shutil.rmtree(name) if is_directory else os.unlink(name)
    fsync_directory(path)
    (path / LOCK_NAME).unlink(missing_ok=True)
    path.rmdir()
