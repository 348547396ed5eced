"""DeepSpeed's libaio keeps the promises too. Selected without deepspeed these tests fail, with the reason."""

import subprocess
import sys
import textwrap

import pytest
import torch
from io_layer.backend_contract import PATTERN, BackendContract, aligned, empty

from tierstep.io.requests import Read, Write
from tierstep.io.selection import open_backend

pytestmark = [
    pytest.mark.libaio,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:::deepspeed.*"),
    pytest.mark.filterwarnings("ignore:::torch.*"),
]
NBYTES = 40 << 20


def as_tensor(memory):
    return torch.frombuffer(memory, dtype=torch.uint8)


class TestLibaio(BackendContract):
    @pytest.fixture
    def directory(self, tmp_path):
        return tmp_path

    @pytest.fixture
    def backend(self):
        with open_backend("libaio", as_tensor=as_tensor, build=True) as backend:
            yield backend

    def test_records_move_through_libaio_without_a_doubt(self, backend, directory):
        data = PATTERN * 4
        backend.allocate(directory / "record", NBYTES)
        self.write(backend, directory / "record", 0, data)
        assert self.read(backend, directory / "record", 0, NBYTES) == data
        assert backend.doubted_blocks == 0


def test_records_survive_python_o_and_a_process_that_forgets_to_close(tmp_path):
    """A handle that is alive at the end of the interpreter aborts it, in one run of three."""
    code = f"""
        from pathlib import Path
        import torch
        from tierstep.io.buffers import PageBuffer
        from tierstep.io.requests import Read, Write
        from tierstep.io.selection import open_backend

        path, memory = Path({str(tmp_path)!r}) / "record", PageBuffer(20 << 20).view
        memory[:] = bytes(range(256)) * (memory.nbytes // 256)
        backend = open_backend("libaio", as_tensor=lambda m: torch.frombuffer(m, dtype=torch.uint8))
        backend.allocate(path, memory.nbytes)
        backend.submit(Write(path, 0, memory)).wait()
        if path.read_bytes() != memory:
            raise SystemExit("other bytes")
    """
    for _ in range(3):
        subprocess.run([sys.executable, "-O", "-W", "ignore", "-c", textwrap.dedent(code)], check=True)


def test_threads_read_what_libaio_wrote_and_the_other_way_round(tmp_path):
    data, path = PATTERN * 4, tmp_path / "record"
    backends = [open_backend("libaio", as_tensor=as_tensor, build=True), open_backend("threads")]
    backends[0].allocate(path, NBYTES)
    for writer, reader in (backends, backends[::-1]):
        memory = empty(NBYTES)
        writer.submit(Write(path, 0, aligned(data))).wait()
        reader.submit(Read(path, 0, memory)).wait()
        assert memory == data
        data = data[::-1]
    for backend in backends:
        backend.close()
