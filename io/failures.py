"""From what the operating system says to the errors that callers see, and which of its answers mean "try again"."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tierstep.errors import DiskFull, TransferError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
DIRECT_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
RETRIES = 1000
RETRY_PAUSE_S = 0.001

Result = TypeVar("Result")


def retry_interrupted(call: Callable[[], Result]) -> Result:
    """Call until the system neither was interrupted (EINTR) nor asks to come again (EAGAIN); give up after a second."""
    for _ in range(RETRIES):
        try:
            return call()
        except InterruptedError:
            continue
        except BlockingIOError:
            time.sleep(RETRY_PAUSE_S)
    return call()


@contextmanager
def named_failures(operation: object, path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `TransferError` that names the operation; let everything else pass."""
    try:
        yield
    except TransferError:
        raise
    except OSError as error:
        raise transfer_error(operation, path, error) from error


def transfer_error(operation: object, path: Path, error: OSError) -> TransferError:
    """Return the error that callers see for `error`: `DiskFull` or `TransferError`, with errno and path."""
    code = error.errno or errno.EIO
    reason = f"{operation} failed: {os.strerror(code)} ({errno.errorcode.get(code, code)})"
    if code in FULL:
        message = f"{reason}; {_free(path)}: free some space, or use another directory"
        return DiskFull(message, path=path, errno=code)
    return TransferError(reason + _REMEDIES.get(code, ""), path=path, errno=code)


def free_bytes(directory: Path) -> int:
    """Return the bytes that this user may still write on the file system of `directory`."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _free(path: Path) -> str:
    try:
        return f"{free_bytes(path.parent)} bytes are free in {path.parent}"
    except OSError:
        return f"{path.parent} is full"


_REMEDIES = {
    errno.EFBIG: "; the process's file size limit (ulimit -f) or the file system's is reached: raise it",
    errno.EIO: "; the drive reports an error: see the kernel's log",
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
    errno.EROFS: "; the file system is mounted read-only",
}
