"""What the backends have in common that move aligned spans through handles of the kernel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

from tierstep.io.backend import DEFAULT_TIMEOUT_S
from tierstep.io.files import RequestFile
from tierstep.io.threads import ThreadBackend


class Handle(Protocol):
    """Moves aligned spans with several operations at once. For one thread at a time."""

    doubted_blocks: int

    def move(self, file: RequestFile, start: int, stop: int) -> None:
        """Move bytes `start..stop` of the request's buffer past the page cache. Blocks. Raises `TransferError`.

        What the handle does not move for sure is moved again by `RequestFile.move_direct`, and counted as doubted.
        """

    def close(self) -> None:
        """Free what the handle holds. May be called again."""


class HandleBackend(ThreadBackend):
    """Moves aligned spans through a handle a thread, all else as `ThreadBackend` does.

    A request is cut into pieces of `piece_bytes`; a handle moves one piece at a time. `doubted_blocks` counts the
    blocks that a handle did not move for sure, and that the reference code moved again.
    """

    def __init__(self, handles: Sequence[Handle], *, piece_bytes: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(threads=len(handles), block_bytes=piece_bytes, timeout_s=timeout_s)
        self._handles = tuple(handles)
        self._free: SimpleQueue[Handle] = SimpleQueue()
        for handle in handles:
            self._free.put(handle)
        self._pid = os.getpid()

    @property
    def doubted_blocks(self) -> int:
        """Blocks moved a second time, by the reference code."""
        return sum(handle.doubted_blocks for handle in self._handles)

    def close(self) -> None:
        """See `IoBackend.close`. In a forked child, which has no such threads, the handles are left alone."""
        super().close()
        if not self._inherited:
            for handle in self._handles:
                handle.close()

    @property
    def _inherited(self) -> bool:
        """Whether this is the copy of a forked child."""
        return os.getpid() != self._pid

    def _move(self, file: RequestFile, start: int, stop: int) -> None:
        first, last = file.direct_span(start, stop)
        file.move_buffered(start, first)
        if first < last:
            handle = self._free.get()  # never waits: there are as many handles as threads
            try:
                handle.move(file, first, last)
            finally:
                self._free.put(handle)
        file.move_buffered(last, stop)
