"""Where a transfer may go past the page cache: pure arithmetic on offsets, lengths and addresses."""

from __future__ import annotations

ALIGNMENT_BYTES = 4096
"""File offsets, lengths and buffer addresses that are multiples of this suit O_DIRECT on every known drive."""


def align_up(nbytes: int, alignment_bytes: int) -> int:
    """Return the smallest multiple of `alignment_bytes` that is at least `nbytes`."""
    return -(-nbytes // alignment_bytes) * alignment_bytes


def align_down(nbytes: int, alignment_bytes: int) -> int:
    """Return the largest multiple of `alignment_bytes` that is at most `nbytes`."""
    return nbytes // alignment_bytes * alignment_bytes


def direct_span(offset: int, address: int, start: int, stop: int) -> tuple[int, int]:
    """Return the part of buffer bytes `start..stop` that may go past the page cache; `(stop, stop)` when none may.

    Byte i of the buffer lies at `address + i` in memory and at `offset + i` in the file. Both have to be aligned at
    the same i, so the whole buffer is unsuitable when the two differ modulo `ALIGNMENT_BYTES`.
    """
    if (address - offset) % ALIGNMENT_BYTES:
        return stop, stop
    first = align_up(offset + start, ALIGNMENT_BYTES) - offset
    last = align_down(offset + stop, ALIGNMENT_BYTES) - offset
    return (first, last) if first < last else (stop, stop)


def cut_blocks(offset: int, nbytes: int, block_bytes: int) -> list[tuple[int, int]]:
    """Cut `nbytes` at file `offset` into (start, stop) pairs relative to `offset`, at file multiples of `block_bytes`.

    The cuts are aligned in the file (when `block_bytes` is), so no cut makes a transfer unaligned.
    """
    stops = range(align_down(offset, block_bytes) + block_bytes - offset, nbytes, block_bytes)
    cuts = [0, *stops, nbytes] if nbytes else []
    return list(zip(cuts, cuts[1:], strict=False))
