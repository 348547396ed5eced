"""Moving one request's bytes with positioned reads and writes: past the page cache where possible, checked always."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from tierstep.errors import TransferError
from tierstep.io.alignment import direct_span
from tierstep.io.buffers import address_of
from tierstep.io.failures import DIRECT_REFUSED, named_failures, retry_interrupted, transfer_error
from tierstep.io.requests import Read, Request

UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
LINK_REFUSED = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})
ZEROS = bytes(1 << 20)


class RequestFile:
    """The file of one request, open from construction to `close`; `move` may be called by several threads.

    There are two descriptors: one past the page cache (`direct`, None where it is refused or of no use) and an
    ordinary one. `on_refusal(directory, reason)` is called when O_DIRECT would be of use and is refused, at opening
    or by a transfer; the same bytes go through the page cache then. `try_direct=False` does not even ask.
    """

    def __init__(self, request: Request, on_refusal: Callable[[Path, str], None], *, try_direct: bool = True) -> None:
        self.request = request
        self.memory = request.buffer.cast("B") if request.buffer.nbytes else memoryview(bytearray())
        self.address = address_of(self.memory)
        self.direct: int | None = None
        self._on_refusal = on_refusal
        self.reading = isinstance(request, Read)
        with named_failures(request, request.path):
            self._buffered = self._open(0)
            try:
                if try_direct:
                    self._open_direct()
            except BaseException:
                os.close(self._buffered)
                raise

    def move(self, start: int, stop: int) -> None:
        """Move bytes `start..stop` of the buffer. Blocks without the GIL. Raises `TransferError`."""
        first, last = self.direct_span(start, stop)
        self.move_buffered(start, first)
        self.move_direct(first, last)
        self.move_buffered(last, stop)

    def direct_span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of `start..stop` that goes past the page cache."""
        if self.direct is None:
            return stop, stop
        return direct_span(self.request.offset, self.address, start, stop)

    def move_direct(self, start: int, stop: int) -> None:
        """Move an aligned part past the page cache, or through it where the file system refuses that after all."""
        if start == stop or self.direct is None:
            return
        try:
            moved = self._transfer(self.direct, start, stop)
        except OSError as error:
            if error.errno not in DIRECT_REFUSED:
                raise transfer_error(self.request, self.request.path, error) from error
            self.move_buffered(start, stop)
            self._on_refusal(self.request.path.parent, f"O_DIRECT transfers fail with {os.strerror(error.errno)}")
            return
        # A direct transfer that falls short ends at an odd byte (the end of a file, a full drive) and cannot go on
        # from there; an ordinary one can, and tells what the matter is.
        self.move_buffered(start + moved, stop)

    def move_buffered(self, start: int, stop: int) -> None:
        """Move a part through the page cache, as often as it takes. Raises `TransferError` when nothing moves."""
        with named_failures(self.request, self.request.path):
            while start < stop:
                moved = self._transfer(self._buffered, start, stop)
                if moved == 0:
                    raise self._short(start)
                start += moved

    def size(self) -> int:
        """Return the file's length in bytes now."""
        with named_failures(self.request, self.request.path):
            return os.fstat(self._buffered).st_size

    def close(self) -> None:
        """Close the descriptors. Raises `TransferError` when the system reports a failed write only now."""
        with named_failures(self.request, self.request.path):
            try:
                os.close(self._buffered)
            finally:
                if self.direct is not None:
                    os.close(self.direct)

    def _open(self, extra: int) -> int:
        access = os.O_RDONLY if self.reading else os.O_WRONLY | os.O_CREAT
        return retry_interrupted(lambda: os.open(self.request.path, access | os.O_CLOEXEC | extra, 0o666))

    def _open_direct(self) -> None:
        first, last = direct_span(self.request.offset, self.address, 0, self.memory.nbytes)
        if first == last:
            return
        try:
            self.direct = self._open(os.O_DIRECT)
        except OSError as error:
            if error.errno not in DIRECT_REFUSED:
                raise
            self._on_refusal(self.request.path.parent, f"opening with O_DIRECT fails with {os.strerror(error.errno)}")

    def _transfer(self, descriptor: int, start: int, stop: int) -> int:
        part, offset = [self.memory[start:stop]], self.request.offset + start
        operation = os.preadv if self.reading else os.pwritev
        return retry_interrupted(lambda: operation(descriptor, part, offset))

    def _short(self, moved: int) -> TransferError:
        reason = f"the file ends at byte {self.size()}" if self.reading else "is the drive full?"
        message = f"{self.request} stopped after {moved} of {self.memory.nbytes} bytes; {reason}"
        return TransferError(message, path=self.request.path)


def allocate_file(path: Path, nbytes: int) -> None:
    """See `IoBackend.allocate`."""
    with named_failures(f"allocation of {nbytes} bytes for {path}", path):
        existed = path.exists()
        descriptor = retry_interrupted(lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        try:
            _resize(descriptor, nbytes)
        except BaseException:
            if not existed:
                path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)


def link_file(path: Path, target: Path) -> bool:
    """See `IoBackend.link`."""
    with named_failures(f"link of {path} to {target}", target):
        try:
            os.link(path, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in LINK_REFUSED:
                raise
            return False
    return True


def remove_file(path: Path) -> None:
    """See `IoBackend.remove`."""
    with named_failures(f"removal of {path}", path):
        path.unlink(missing_ok=True)


def _resize(descriptor: int, nbytes: int) -> None:
    """Reserve the blocks of an open file and set its length; leave the length as it was on failure."""
    present = os.fstat(descriptor).st_size
    try:
        _reserve(descriptor, present, nbytes)
    except BaseException:
        os.ftruncate(descriptor, present)
        raise
    os.ftruncate(descriptor, nbytes)


def _reserve(descriptor: int, present: int, nbytes: int) -> None:
    if not nbytes:
        return
    try:
        retry_interrupted(lambda: os.posix_fallocate(descriptor, 0, nbytes))
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _write_zeros(descriptor, present, nbytes)


def _write_zeros(descriptor: int, offset: int, stop: int) -> None:
    """Reserve space on a file system that cannot be asked to: by filling it."""
    while offset < stop:
        part = ZEROS[: stop - offset]
        written = os.pwrite(descriptor, part, offset)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        offset += written
