"""What the machine under the tests lacks, as markers that say so in the list of skipped tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierstep.io import ring

_no_uring = ring.why_unavailable()
needs_uring = pytest.mark.skipif(_no_uring is not None, reason=f"backend uring: {_no_uring}")


@contextmanager
def mounted(directory: Path, *arguments: str) -> Iterator[Path]:
    """Mount something at a new directory for the length of a block; skip the test where that is not permitted."""
    directory.mkdir()
    made = subprocess.run(["mount", *arguments, str(directory)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"mounting is not permitted here: {made.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
