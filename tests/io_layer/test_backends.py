"""Every backend keeps the same promises."""

import errno
import tempfile
from pathlib import Path

import pytest
from io_layer.backend_contract import BackendContract

from tierstep.io.directories import filesystem_type
from tierstep.io.memory import Fail, MemoryBackend
from tierstep.io.threads import ThreadBackend


class TestThreadsOnDisk(BackendContract):
    @pytest.fixture
    def directory(self, tmp_path):
        return tmp_path

    @pytest.fixture
    def backend(self):
        with ThreadBackend(threads=4, block_bytes=2 << 20) as backend:
            yield backend


@pytest.mark.skipif(filesystem_type(Path("/dev/shm")) != "tmpfs", reason="this machine has no tmpfs")
@pytest.mark.filterwarnings("ignore::tierstep.io.directories.BufferedFallbackWarning")
class TestThreadsOnTmpfs(TestThreadsOnDisk):
    @pytest.fixture
    def directory(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            yield Path(name)


class TestMemory(BackendContract):
    @pytest.fixture
    def directory(self):
        return Path("/nowhere")

    @pytest.fixture
    def backend(self):
        with MemoryBackend() as backend:
            yield backend

    def length(self, backend, path):
        return len(backend.files[path])

    def exists(self, backend, path):
        return path in backend.files

    def unwritable(self, backend, directory):
        backend.inject(Fail(errno.EIO), when=lambda operation: operation.kind == "write")
        return directory / "record"
