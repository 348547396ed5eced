"""A drive that is really full. Needs the right to mount; test_threads.py has the same with injected answers."""

import subprocess

import pytest
from io_layer.backend_contract import PATTERN, aligned, empty

from tierstep.errors import DiskFull
from tierstep.io.durable import write_durably
from tierstep.io.requests import Read, Write
from tierstep.io.threads import ThreadBackend
from tierstep.io.uring import open_uring

from machine import mounted, needs_uring

pytestmark = pytest.mark.filterwarnings("ignore::tierstep.io.directories.BufferedFallbackWarning")


@pytest.fixture
def small_tmpfs(tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as directory:
        yield directory


@pytest.fixture
def small_ext4(tmp_path):
    image = tmp_path / "image"
    image.write_bytes(bytes(32 << 20))
    try:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no ext4 can be made here: {error}")
    with mounted(tmp_path / "small", "-o", "loop", str(image)) as directory:
        yield directory


@pytest.fixture(params=["threads", pytest.param("uring", marks=needs_uring)])
def backend(request):
    if request.param == "uring":
        return open_uring(rings=2, depth=2, block_bytes=1 << 18)
    return ThreadBackend(threads=2, block_bytes=1 << 18)


def fill_and_go_on(backend, directory, capacity_bytes):
    with backend:
        kept, data = directory / "kept", PATTERN[: capacity_bytes // 4]
        backend.allocate(kept, len(data))
        backend.submit(Write(kept, 0, aligned(data))).wait()
        with pytest.raises(DiskFull, match=rf"allocation of {capacity_bytes} bytes .* \d+ bytes are free"):
            backend.allocate(directory / "big", capacity_bytes)
        assert not (directory / "big").exists()
        with pytest.raises(DiskFull, match="ENOSPC"):
            backend.submit(Write(directory / "unplanned", 0, empty(capacity_bytes))).wait()
        with pytest.raises(DiskFull):
            write_durably(directory / "manifest", bytes(capacity_bytes))
        assert sorted(path.name for path in directory.iterdir() if path.is_file()) == ["kept", "unplanned"]
        memory = empty(len(data))
        backend.submit(Write(kept, 0, aligned(data[::-1]))).wait()  # what is reserved can be overwritten all the same
        backend.submit(Read(kept, 0, memory)).wait()
        assert memory == data[::-1]
        backend.remove(directory / "unplanned")
        backend.allocate(directory / "planned", len(data))


def test_a_full_tmpfs_is_reported_and_loses_nothing(backend, small_tmpfs):
    fill_and_go_on(backend, small_tmpfs, 1 << 20)


@pytest.mark.slow
def test_a_full_ext4_is_reported_and_loses_nothing(backend, small_ext4):
    fill_and_go_on(backend, small_ext4, 32 << 20)
