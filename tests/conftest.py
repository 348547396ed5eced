"""What tests all over the suite share."""

import pytest


@pytest.fixture(scope="session")
def _libaio_extension():
    """DeepSpeed's libaio extension, compiled once: minutes on a machine that has not seen it yet."""
    import torch

    from tierstep.io.selection import open_backend

    open_backend("libaio", as_tensor=lambda memory: torch.frombuffer(memory, dtype=torch.uint8), build=True).close()


@pytest.fixture(autouse=True)
def _libaio_before_its_tests(request):
    """Whatever their order, tests marked `libaio` find the extension built: users never build it unasked."""
    if request.node.get_closest_marker("libaio"):
        request.getfixturevalue("_libaio_extension")


@pytest.fixture(autouse=True)
def _own_cache(request, monkeypatch, tmp_path_factory):
    """What the machine's user has calibrated changes no test, nor the other way round.

    Except for tests marked `libaio`: the built extension is looked for in the user's cache.
    """
    if not request.node.get_closest_marker("libaio"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
