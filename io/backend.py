"""The one door to files: a backend moves bytes between buffers and files, asynchronously and checked."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from tierstep.io.requests import Completion, Request

DEFAULT_TIMEOUT_S = 600.0
"""How long `Completion.wait` waits for one transfer; a drive that has lost its link answers after minutes."""

Backend = TypeVar("Backend", bound="IoBackend")


class IoBackend(Protocol):
    """Moves bytes; every method may be called from any thread, of the process that opened the backend.

    Whatever goes wrong is a `tierstep.errors.TransferError` with path and errno: raised by the method itself, or by
    `Completion.wait()` for submitted requests. A completion without an error means: every byte was moved.
    A `with` block closes the backend at its end.
    """

    name: str

    def allocate(self, path: Path, nbytes: int) -> None:
        """Make `path` a file of exactly `nbytes` reserved bytes (content undefined where new). Blocks.

        An existing file keeps its first `nbytes` bytes. Raises `DiskFull` when the space is not there; then no file is
        left behind that was not there before, and an existing one is as long as before.
        """

    def remove(self, path: Path) -> None:
        """Delete `path`; a file that does not exist is fine. Blocks."""

    def link(self, path: Path, target: Path) -> bool:
        """Give the file `path` a second name, `target`, which must not exist. Blocks.

        Returns False where the two cannot share a file (another file system, or one without hard links).
        """

    def link_count(self, path: Path) -> int:
        """Return how many names the file has; 1 means that nobody else holds it. Blocks."""

    def submit(self, request: Request) -> Completion:
        """Start one transfer and return at once. Any offset, length and buffer address is accepted.

        Multiples of `ALIGNMENT_BYTES` go past the page cache where the file system allows it. Requests in flight
        complete in any order; two of them must not touch the same bytes when one is a write.
        """

    def close(self) -> None:
        """Wait for what is in flight, then free threads and handles. Later calls of `submit` are refused.

        May be called again. Raises `TransferTimeout` when something in flight does not end in time.
        """

    def __enter__(self: Backend) -> Backend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
