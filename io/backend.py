"""The one door to files: a backend moves bytes between buffers and files, asynchronously and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tierstep.io.requests import Completion, Request


class IoBackend(Protocol):
    """Moves bytes; every method may be called from any thread.

    Whatever goes wrong is a `tierstep.errors.TransferError` with path and errno: raised by the method itself, or by
    `Completion.wait()` for submitted requests. A completion without an error means: every byte was moved.
    """

    name: str

    def allocate(self, path: Path, nbytes: int) -> None:
        """Make `path` a file of exactly `nbytes` reserved bytes (content undefined where new). Blocks.

        Raises `DiskFull` when the space is not there; then no file is left behind that was not there before.
        """

    def remove(self, path: Path) -> None:
        """Delete `path`; a file that does not exist is fine. Blocks."""

    def submit(self, request: Request) -> Completion:
        """Start one transfer and return at once. Any offset, length and buffer address is accepted.

        Multiples of `ALIGNMENT_BYTES` go past the page cache where the file system allows it. Requests in flight
        complete in any order; two of them must not touch the same bytes when one is a write.
        """

    def close(self) -> None:
        """Wait for what is in flight, then free threads and handles. Later calls of `submit` are refused."""
