"""What the machine under the tests lacks, as markers that say so in the list of skipped tests."""

from __future__ import annotations

import pytest

from tierstep.io import ring

_no_uring = ring.why_unavailable()
needs_uring = pytest.mark.skipif(_no_uring is not None, reason=f"backend uring: {_no_uring}")
