"""DeepSpeed's asynchronous I/O handle, watched: every block that it claims to have moved is looked at."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tierstep.io.alignment import ALIGNMENT_BYTES, cut_blocks
from tierstep.io.buffers import PageBuffer
from tierstep.io.failures import named_failures, retry_interrupted
from tierstep.io.files import RequestFile

PIECE_BYTES = 16 << 20
BLOCK_BYTES = 4 << 20

AsTensor = Callable[[memoryview], Any]
Span = tuple[int, int]


class AioHandle(Protocol):
    """The part of DeepSpeed's `aio_handle` that is used: calls that return when the transfer is over."""

    def sync_pread(self, buffer: Any, filename: str, file_offset: int) -> int:  # noqa: ANN401
        """Return 1 when a read was done, in whatever way it ended."""

    def sync_pwrite(self, buffer: Any, filename: str, file_offset: int) -> int:  # noqa: ANN401
        """Return 1 when a write was done, in whatever way it ended."""

    def is_pinned(self, buffer: Any) -> bool:  # noqa: ANN401
        """Say whether the memory is used in place."""

    def new_cpu_locked_tensor(self, num_elem: int, example: Any) -> Any:  # noqa: ANN401
        """Return locked memory."""

    def free_cpu_locked_tensor(self, locked: Any) -> bool:  # noqa: ANN401
        """Free locked memory."""


class GuardedHandle:
    """A DeepSpeed handle and its locked memory: moves pieces, and looks at what came of it. For one thread at a time.

    A block is a piece of `BLOCK_BYTES` that the extension hands to the kernel as one operation. The kernel works
    through it from the front, so the last sector, the *guard*, tells whether it went through. Before a read, guards
    are filled with random bytes that no file holds; where they are still there, nothing was read. After a write,
    guards are read back and compared; a block whose guard has the new bytes already, before it is written, could not
    be told apart, so the piece is written by the reference backend's code from the start.
    """

    def __init__(self, handle: AioHandle, as_tensor: AsTensor) -> None:
        self.doubted_blocks = 0
        self._handle: AioHandle | None = handle
        self._as_tensor = as_tensor
        self._locked = handle.new_cpu_locked_tensor(PIECE_BYTES, as_tensor(memoryview(bytearray(1))))
        self._unread = secrets.token_bytes(ALIGNMENT_BYTES)

    def move(self, file: RequestFile, start: int, stop: int) -> None:
        """Move an aligned span of at most `PIECE_BYTES`. Blocks. Raises `TransferError`."""
        if file.memory.readonly or file.request.offset + stop > file.size():
            file.move_direct(start, stop)  # the extension needs writable memory, and bytes that the file has
            return
        blocks = [(start + first, start + last) for first, last in cut_blocks(0, stop - start, BLOCK_BYTES)]
        doubted = self._read(file, blocks) if file.reading else self._write(file, blocks)
        self.doubted_blocks += len(doubted)
        for first, last in doubted:
            file.move_direct(first, last)

    def close(self) -> None:
        """Free the locked memory and end the handle's threads. May be called again."""
        if self._handle is not None:
            self._handle.free_cpu_locked_tensor(self._locked)
            self._locked, self._handle = None, None

    def _read(self, file: RequestFile, blocks: list[Span]) -> list[Span]:
        """Read consecutive blocks; return those that were not read for sure."""
        start, stop = blocks[0][0], blocks[-1][1]
        memory = self._as_tensor(file.memory[start:stop])
        target = self._in_locked_memory(memory)
        arrived = memoryview(target.numpy())
        for _, last in blocks:
            arrived[last - start - ALIGNMENT_BYTES : last - start] = self._unread
        done = self._open_handle.sync_pread(target, str(file.request.path), file.request.offset + start)
        doubted = [
            (first, last)
            for first, last in blocks
            if done != 1 or arrived[last - start - ALIGNMENT_BYTES : last - start] == self._unread
        ]
        if target is not memory:
            memory.copy_(target)
        return doubted

    def _write(self, file: RequestFile, blocks: list[Span]) -> list[Span]:
        """Write consecutive blocks; return those that were not written for sure."""
        start, stop = blocks[0][0], blocks[-1][1]
        with _sectors(file) as sector_at:
            if any(sector_at(last) == _guard(file, last) for _, last in blocks):
                file.move_direct(start, stop)
                return []
            memory = self._as_tensor(file.memory[start:stop])
            source = self._in_locked_memory(memory)
            if source is not memory:
                source.copy_(memory)
            done = self._open_handle.sync_pwrite(source, str(file.request.path), file.request.offset + start)
            return [(first, last) for first, last in blocks if done != 1 or sector_at(last) != _guard(file, last)]

    @property
    def _open_handle(self) -> AioHandle:
        if self._handle is None:
            raise ValueError("the handle is closed")
        return self._handle

    def _in_locked_memory(self, memory: Any) -> Any:  # noqa: ANN401
        """Return `memory` itself if the extension uses it in place, or as much of the handle's locked memory."""
        return memory if self._open_handle.is_pinned(memory) else self._locked[: memory.numel()]


def _guard(file: RequestFile, block_stop: int) -> memoryview:
    return file.memory[block_stop - ALIGNMENT_BYTES : block_stop]


@contextmanager
def _sectors(file: RequestFile) -> Iterator[Callable[[int], memoryview]]:
    """Give a function that reads, past the page cache, the last sector before a position of the request's buffer."""
    request = file.request
    buffer = PageBuffer(ALIGNMENT_BYTES)

    def sector_at(block_stop: int) -> memoryview:
        offset = request.offset + block_stop - ALIGNMENT_BYTES
        with named_failures(f"check of the {request}", request.path):
            moved = retry_interrupted(lambda: os.preadv(descriptor, [buffer.view], offset))
        return buffer.view[:moved]

    with named_failures(f"check of the {request}", request.path):
        descriptor = os.open(request.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        yield sector_at
    finally:
        os.close(descriptor)
