"""Making bytes survive a crash: the data first, then the name that makes it visible."""

from __future__ import annotations

import errno
import os
import secrets
from functools import partial
from pathlib import Path

from tierstep.io.failures import named_failures, retry_interrupted


def fsync_file(path: Path) -> None:
    """Return when the file's bytes and length are on the drive. Raises `TransferError`."""
    with named_failures(f"fsync of {path}", path):
        _fsync(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Return when the directory's names (made, renamed, removed) are on the drive. Raises `TransferError`.

    File systems that cannot sync a directory say EINVAL; they give no promise that could be waited for.
    """
    with named_failures(f"fsync of directory {path}", path):
        try:
            _fsync(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise


def make_directories(path: Path) -> None:
    """Make `path` and whatever is missing above it; return when all of that is on the drive. Raises `TransferError`."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    with named_failures(f"making directory {path}", path):
        path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync_directory(folder.parent)


def write_durably(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Make `path` hold exactly `data`, at once: after a crash at any instant it holds the old bytes or the new.

    Written to a temporary name in the same directory, synced, renamed, directory synced. Blocks. Raises `DiskFull` or
    `TransferError`; before the rename the old file is untouched then, and the temporary one is removed.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with named_failures(f"writing {memoryview(data).nbytes} bytes to {path}", path):
        try:
            _write_new(draft, memoryview(data).cast("B"))
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    fsync_directory(path.parent)


def _write_new(path: Path, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        while data.nbytes:
            moved = retry_interrupted(partial(os.write, descriptor, data))
            if not moved:
                raise OSError(errno.EIO, "no byte was written")
            data = data[moved:]
        retry_interrupted(lambda: os.fsync(descriptor))
    finally:
        os.close(descriptor)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        retry_interrupted(lambda: os.fsync(descriptor))
    finally:
        os.close(descriptor)
