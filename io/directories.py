"""What a directory can do: is it there, is it writable, does its file system take O_DIRECT, what is free."""

from __future__ import annotations

import os
import secrets
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

from tierstep.errors import ConfigError
from tierstep.io.alignment import ALIGNMENT_BYTES
from tierstep.io.buffers import PageBuffer
from tierstep.io.drives import find_mount
from tierstep.io.failures import free_bytes


class BufferedFallbackWarning(UserWarning):
    """A file system refuses O_DIRECT, so transfers go through the page cache: same bytes, slower, more host memory."""


@dataclass(frozen=True)
class DirectoryProbe:
    """What `probe_directory` found out; the directory exists and is writable, or there would be no probe."""

    path: Path
    filesystem: str
    """The file system's type, such as "ext4"; "unknown" when the system does not tell."""
    direct: bool
    """Whether O_DIRECT was accepted at opening, by a write and by a read that gave the same bytes."""
    reason: str | None
    """Why `direct` is False."""
    free_bytes: int
    """Bytes that this user may still write."""


def probe_directory(path: Path | str) -> DirectoryProbe:
    """Try a directory out with a temporary file of 4 KiB, which is removed. Blocks.

    Raises `ConfigError`, with path and remedy, when it is missing, not a directory, or not writable.
    """
    directory = require_directory(path)
    reason = _why_not_direct(directory)
    return DirectoryProbe(directory, filesystem_type(directory), reason is None, reason, free_bytes(directory))


def require_directory(path: Path | str) -> Path:
    """Return `path` as a Path. Raises `ConfigError` when it is missing, not a directory, or not writable."""
    directory = Path(path)
    if not directory.exists():
        raise ConfigError(f"directory {directory} does not exist: create it, or pass another one")
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: pass the directory that files should go to")
    read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
    if read_only or not os.access(directory, os.W_OK | os.X_OK):
        why = "its file system is mounted read-only" if read_only else "this user may not write there"
        raise ConfigError(f"directory {directory} is not writable ({why}): change that, or pass another one")
    return directory


def filesystem_type(path: Path, mounts: str | None = None) -> str:
    """Return the type of the file system that holds `path`, from the text of /proc/self/mountinfo."""
    return find_mount(path, mounts).filesystem


class FallbackNotices:
    """Warns once per directory that its transfers go through the page cache. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: set[Path] = set()

    def given(self, directory: Path) -> bool:
        """Say whether `directory` is known to refuse O_DIRECT."""
        return directory in self._given

    def give(self, directory: Path, reason: str) -> None:
        """Warn about `directory`, unless that was done."""
        with self._lock:
            if directory in self._given:
                return
            self._given.add(directory)
        warnings.warn(
            f"{directory}: {reason}; its transfers go through the page cache, which is slower: use a directory on "
            "ext4 or xfs for full speed",
            BufferedFallbackWarning,
            stacklevel=2,
        )


def _why_not_direct(directory: Path) -> str | None:
    file = directory / f".tierstep-probe-{secrets.token_hex(8)}"
    try:
        return _try_direct(file)
    except OSError as error:
        return f"O_DIRECT fails with {error.strerror}"
    finally:
        file.unlink(missing_ok=True)


def _try_direct(file: Path) -> str | None:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    pattern = secrets.token_bytes(ALIGNMENT_BYTES)
    try:
        with PageBuffer(2 * ALIGNMENT_BYTES) as buffer:
            written, read = buffer.view[:ALIGNMENT_BYTES], buffer.view[ALIGNMENT_BYTES:]
            written[:] = pattern
            moved = os.pwritev(descriptor, [written], 0), os.preadv(descriptor, [read], 0)
            if moved != (ALIGNMENT_BYTES, ALIGNMENT_BYTES) or bytes(read) != pattern:
                return "O_DIRECT transfers give other bytes than were written"
    finally:
        os.close(descriptor)
    return None
