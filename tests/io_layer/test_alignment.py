"""Where transfers may go past the page cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstep.io.alignment import ALIGNMENT_BYTES, align_down, align_up, cut_blocks, direct_span

ANY = st.integers(0, 1 << 40)


@given(ANY, st.sampled_from([1, 64, 512, 4096, 2 << 20]))
def test_aligning_gives_the_nearest_multiples(nbytes, alignment):
    assert align_up(nbytes, alignment) % alignment == align_down(nbytes, alignment) % alignment == 0
    assert align_down(nbytes, alignment) <= nbytes <= align_up(nbytes, alignment)
    assert align_up(nbytes, alignment) - align_down(nbytes, alignment) in (0, alignment)


@given(ANY, ANY, st.integers(0, 20000), st.integers(0, 1 << 26))
def test_a_direct_span_is_aligned_in_memory_and_in_the_file_and_lies_inside(offset, address, start, nbytes):
    stop = start + nbytes
    first, last = direct_span(offset, address, start, stop)
    assert start <= first <= last <= stop
    if first == last:
        assert (first, last) == (stop, stop)
    else:
        assert (offset + first) % ALIGNMENT_BYTES == (address + first) % ALIGNMENT_BYTES == 0
        assert (last - first) % ALIGNMENT_BYTES == 0
        assert first - start < ALIGNMENT_BYTES
        assert stop - last < ALIGNMENT_BYTES


@pytest.mark.parametrize(
    ("offset", "address", "stop", "expected"),
    [
        (0, 8192, 8192, (0, 8192)),
        (0, 8192, 8193, (0, 8192)),
        (1, 8193, 8192, (4095, 4095 + 4096)),
        (0, 8192, 4095, (4095, 4095)),
        (0, 8193, 9000, (9000, 9000)),
    ],
)
def test_direct_spans_by_example(offset, address, stop, expected):
    assert direct_span(offset, address, 0, stop) == expected


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 20), st.sampled_from([4096, 65536]))
def test_blocks_cover_a_request_once_and_are_cut_at_multiples_in_the_file(offset, nbytes, block_bytes):
    blocks = cut_blocks(offset, nbytes, block_bytes)
    assert sum(stop - start for start, stop in blocks) == nbytes
    assert [start for start, _ in blocks[1:]] == [stop for _, stop in blocks[:-1]]
    assert all((offset + start) % block_bytes == 0 for start, _ in blocks[1:])
    assert all(0 < stop - start <= block_bytes for start, stop in blocks)
