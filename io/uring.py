"""Transfers through io_uring: several blocks under way at once for each thread, every result looked at."""

from __future__ import annotations

from tierstep.errors import ConfigError
from tierstep.io.alignment import cut_blocks
from tierstep.io.backend import DEFAULT_TIMEOUT_S
from tierstep.io.files import RequestFile
from tierstep.io.handles import HandleBackend
from tierstep.io.ring import Ring, Transfer, why_unavailable

DEFAULT_RINGS = 4
DEFAULT_DEPTH = 4
DEFAULT_BLOCK_BYTES = 4 << 20
"""16 blocks of 4 MiB saturated the drives measured (docs/log.md); one ring is one thread."""


class RingHandle:
    """Moves spans of up to `depth` blocks of `block_bytes` through a ring of its own. See `handles.Handle`.

    A block that comes back short or with an error is moved again by the reference code, which continues short
    transfers, waits where the kernel asks to, goes through the page cache where O_DIRECT is refused, and otherwise has
    the reason in words.
    """

    def __init__(self, depth: int, block_bytes: int) -> None:
        self.doubted_blocks = 0
        self._block_bytes = block_bytes
        self._ring = Ring(depth)

    def move(self, file: RequestFile, start: int, stop: int) -> None:
        """See `Handle.move`."""
        if file.direct is None:
            raise ValueError(f"the {file.request} cannot go past the page cache")
        blocks = [(start + first, start + last) for first, last in cut_blocks(0, stop - start, self._block_bytes)]
        transfers = [
            Transfer(file.direct, file.address + first, last - first, file.request.offset + first)
            for first, last in blocks
        ]
        results = self._ring.transfer(transfers, reading=file.reading)
        doubted = [block for block, moved in zip(blocks, results, strict=True) if moved != block[1] - block[0]]
        self.doubted_blocks += len(doubted)
        for first, last in doubted:
            file.move_direct(first, last)

    def close(self) -> None:
        """See `Handle.close`."""
        self._ring.close()


class UringBackend(HandleBackend):
    """Moves aligned spans through io_uring, all else as `ThreadBackend` does. See `IoBackend` for what it promises."""

    name = "uring"


def open_uring(
    *,
    rings: int = DEFAULT_RINGS,
    depth: int = DEFAULT_DEPTH,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> UringBackend:
    """Open the backend with `rings` threads, each with up to `depth` blocks of `block_bytes` under way.

    Raises `ConfigError` with the reason where io_uring cannot be used.
    """
    reason = why_unavailable()
    if reason is not None:
        raise ConfigError(f"backend uring is not available: {reason}; backend threads works without it")
    handles = [RingHandle(depth, block_bytes) for _ in range(rings)]
    return UringBackend(handles, piece_bytes=depth * block_bytes, timeout_s=timeout_s)
