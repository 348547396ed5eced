"""Page-backed memory."""

import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstep.io.buffers import HUGE_PAGE_BYTES, PageBuffer, address_of


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9 << 20))
def test_a_buffer_is_exact_writable_zero_and_aligned(nbytes):
    with PageBuffer(nbytes) as buffer:
        assert buffer.nbytes == buffer.view.nbytes == nbytes
        assert not buffer.view.readonly
        assert bytes(buffer.view[:100]) == bytes(min(100, nbytes))
        assert buffer.address % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 4096) == 0
        assert address_of(buffer.view) == (buffer.address if nbytes else 0)


def test_slices_outlive_close_and_the_buffer_does_not():
    buffer = PageBuffer(3 << 20)
    piece = buffer.view[1 << 20 : 2 << 20]
    buffer.close()
    buffer.close()
    piece[:] = b"\x07" * (1 << 20)
    assert piece[-1] == 7
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.view


def test_addresses_of_constant_bytes_are_found_too():
    data = b"constant bytes"
    assert address_of(memoryview(data)[3:]) == address_of(memoryview(data)) + 3


def test_at_most_two_percent_more_than_asked_becomes_resident():
    code = """
        from pathlib import Path
        from tierstep.io.buffers import PageBuffer

        def resident():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

        for nbytes in (9 << 20, (18 << 20) + 4096, 113 << 20):
            before = resident()
            buffer = PageBuffer(nbytes)
            assert resident() - before < 1 << 19, "untouched memory is resident"
            buffer.view[:] = bytes(nbytes)
            taken = resident() - before
            assert nbytes <= taken + (1 << 19), taken
            assert taken <= nbytes * 1.02 + (1 << 18), (taken, nbytes)
            buffer.close()
            assert resident() - before < 1 << 19, "closed memory is resident"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
