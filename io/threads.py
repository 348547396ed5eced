"""The reference backend: positioned reads and writes on a pool of threads, without the GIL."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from tierstep.errors import TransferError, TransferTimeout
from tierstep.io.alignment import cut_blocks
from tierstep.io.backend import DEFAULT_TIMEOUT_S, IoBackend
from tierstep.io.directories import FallbackNotices
from tierstep.io.failures import named_failures
from tierstep.io.files import RequestFile, allocate_file, link_file, remove_file
from tierstep.io.requests import Completion, Request
from tierstep.io.workers import WorkerPool

DEFAULT_THREADS = 8
DEFAULT_BLOCK_BYTES = 4 << 20
"""8 threads x 4 MiB saturated the drives measured (docs/log.md); more of either gained nothing."""


class ThreadBackend(IoBackend):
    """Moves every request in blocks of `block_bytes` on `threads` threads. See `IoBackend` for what it promises.

    A file is open while a request on it runs, and no longer. Blocks of the oldest request go first.
    """

    name = "threads"

    def __init__(
        self,
        *,
        threads: int = DEFAULT_THREADS,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.block_bytes = block_bytes
        self.timeout_s = timeout_s
        self._notices = FallbackNotices()
        self._pool = WorkerPool(threads, f"tierstep-io-{self.name}")

    def allocate(self, path: Path, nbytes: int) -> None:
        """See `IoBackend.allocate`."""
        allocate_file(path, nbytes)

    def remove(self, path: Path) -> None:
        """See `IoBackend.remove`."""
        remove_file(path)

    def link(self, path: Path, target: Path) -> bool:
        """See `IoBackend.link`."""
        return link_file(path, target)

    def link_count(self, path: Path) -> int:
        """See `IoBackend.link_count`."""
        with named_failures(f"look at {path}", path):
            return path.stat().st_nlink

    def submit(self, request: Request) -> Completion:
        """See `IoBackend.submit`."""
        completion = Completion(request, self.timeout_s)
        if not self._pool.add(partial(self._begin, completion)):
            raise TransferError(f"{request} refused by backend {self.name}: {self._pool.refusal}", path=request.path)
        return completion

    def close(self) -> None:
        """See `IoBackend.close`."""
        if not self._pool.close(self.timeout_s):
            raise TransferTimeout(
                f"backend {self.name} still has transfers under way {self.timeout_s:g} s after it was closed; "
                "is the drive still there?"
            )

    def _begin(self, completion: Completion) -> None:
        """Open the file, do the first block here, and leave the others to whichever thread is free."""
        request = completion.request
        try:
            file = self._open(request)
        except BaseException as error:  # noqa: BLE001 - it appears in `wait`
            completion.finish(error)
            return
        blocks = cut_blocks(request.offset, request.buffer.nbytes, self.block_bytes) or [(0, 0)]
        transfer = _Transfer(self, file, completion, len(blocks))
        jobs = [partial(transfer.run, start, stop) for start, stop in blocks]
        if len(jobs) > 1:
            self._pool.add_first(jobs[1:])
        jobs[0]()

    def _open(self, request: Request) -> RequestFile:
        try_direct = not self._notices.given(request.path.parent)
        return RequestFile(request, self._notices.give, try_direct=try_direct)

    def _move(self, file: RequestFile, start: int, stop: int) -> None:
        """Move one block (a hook for backends that move blocks in another way)."""
        file.move(start, stop)


class _Transfer:
    """One request under way. Its blocks run on any threads; the last one to end closes the file and tells."""

    def __init__(self, backend: ThreadBackend, file: RequestFile, completion: Completion, blocks: int) -> None:
        self._backend = backend
        self._file = file
        self._completion = completion
        self._lock = threading.Lock()
        self._blocks_left = blocks
        self._error: BaseException | None = None

    def run(self, start: int, stop: int) -> None:
        """Move one block, unless another one has failed already."""
        try:
            if self._error is None:
                self._backend._move(self._file, start, stop)
        except BaseException as error:  # noqa: BLE001 - it appears in `wait`
            self._fail(error)
        with self._lock:
            self._blocks_left -= 1
            last = self._blocks_left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        try:
            self._file.close()
        except TransferError as error:
            self._fail(error)
        self._completion.finish(self._error)

    def _fail(self, error: BaseException) -> None:
        """Keep the first error; those that follow from it would hide it."""
        with self._lock:
            self._error = self._error or error
