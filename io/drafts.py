"""Files and folders that appear under their name when every byte of them is durable, and never replace anything."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tierstep.errors import ConfigError, DiskFull
from tierstep.io.durable import fsync_directory, fsync_file
from tierstep.io.failures import free_bytes, named_failures

AT_FDCWD, RENAME_NOREPLACE = -100, 1  # include/uapi/linux/fcntl.h and fs.h
NO_SUCH_CALL = frozenset({errno.ENOSYS, errno.EINVAL})


@contextmanager
def new_file(target: Path, nbytes: int) -> Iterator[BinaryIO]:
    """Yield a file to be filled with about `nbytes` bytes; at the end of the block it is durable and called `target`.

    Until then it has a hidden temporary name beside it. When the block raises, nothing of it is left. Blocks. Raises
    `ConfigError` when `target` exists or its folder does not, `DiskFull` saying how many bytes are missing, before
    anything is written where that is known, and `TransferError`.
    """
    with _published(target, nbytes) as draft:
        with draft.open("xb") as file:
            yield file
        fsync_file(draft)


@contextmanager
def new_folder(target: Path, nbytes: int) -> Iterator[Path]:
    """Yield a folder to put about `nbytes` bytes of files into; see `new_file`."""
    with _published(target, nbytes) as draft:
        draft.mkdir()
        yield draft
        for file in draft.iterdir():
            fsync_file(file)
        fsync_directory(draft)


@contextmanager
def _published(target: Path, nbytes: int) -> Iterator[Path]:
    require_absent(target)
    _require_room(target, nbytes)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with named_failures(f"writing {target}", target):
            yield draft
    except DiskFull as error:
        written = _size(draft)
        raise DiskFull(
            f"{target} takes {nbytes} bytes and its drive was full after {written}: {max(nbytes - written, 1)} are "
            f"missing; nothing is left of it; free some space, or use another directory",
            path=target,
        ) from error
    else:
        with named_failures(f"publication of {target}", target):
            publish(draft, target)
        fsync_directory(target.parent)
    finally:
        _remove(draft)


def require_absent(target: Path) -> None:
    """Raise `ConfigError` where something new called `target` cannot be made."""
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already: give another name, or delete it first")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no directory: make it first, or give another place")


def publish(draft: Path, target: Path) -> None:
    """Rename in one step, never over anything (where the file system can promise that, else after looking).

    Raises `FileExistsError` and `OSError`.
    """
    code = _rename_no_replace(draft, target)
    if code in NO_SUCH_CALL:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        draft.rename(target)
    elif code:
        raise OSError(code, os.strerror(code), str(target))


def _rename_no_replace(draft: Path, target: Path) -> int:
    """Return 0, or the system's error number."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return errno.ENOSYS
    failed = rename(AT_FDCWD, os.fsencode(draft), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE)
    return ctypes.get_errno() if failed else 0


def _require_room(target: Path, nbytes: int) -> None:
    free = free_bytes(target.parent)
    if free < nbytes:
        raise DiskFull(
            f"{target} takes {nbytes} bytes, {free} are free there and {nbytes - free} are missing: free some space, "
            f"or use another directory",
            path=target,
        )


def _size(draft: Path) -> int:
    if draft.is_dir():
        return sum(file.stat().st_size for file in draft.iterdir())
    return draft.stat().st_size if draft.exists() else 0


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        with suppress(OSError):  # what went wrong before is what the caller has to know
            draft.unlink(missing_ok=True)
