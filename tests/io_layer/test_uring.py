"""io_uring keeps the promises too, and what it does not do for sure is done again."""

import errno
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
from io_layer.backend_contract import PATTERN, BackendContract, aligned, empty

from tierstep.errors import ConfigError, TransferTimeout
from tierstep.io import ring
from tierstep.io.directories import filesystem_type
from tierstep.io.requests import Read, Write
from tierstep.io.ring import Ring, Transfer
from tierstep.io.selection import describe_backends, open_backend
from tierstep.io.uring import open_uring

from machine import needs_uring

BLOCK = 1 << 20
NBYTES = 5 * BLOCK


@pytest.fixture
def backend():
    with open_uring(rings=2, depth=3, block_bytes=BLOCK) as backend:
        yield backend


def round_trip(backend, path, nbytes=NBYTES):
    backend.submit(Write(path, 0, aligned(PATTERN[:nbytes]))).wait()
    memory = empty(nbytes)
    backend.submit(Read(path, 0, memory)).wait()
    assert memory == PATTERN[:nbytes]
    assert path.read_bytes() == PATTERN[:nbytes]


@needs_uring
class TestUringOnDisk(BackendContract):
    @pytest.fixture
    def directory(self, tmp_path):
        return tmp_path

    @pytest.fixture
    def backend(self):
        with open_uring(rings=3, depth=2, block_bytes=BLOCK) as backend:
            yield backend


@pytest.mark.skipif(filesystem_type(Path("/dev/shm")) != "tmpfs", reason="this machine has no tmpfs")
@pytest.mark.filterwarnings("ignore::tierstep.io.directories.BufferedFallbackWarning")
class TestUringOnTmpfs(TestUringOnDisk):
    @pytest.fixture
    def directory(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            yield Path(name)


@needs_uring
def test_aligned_spans_go_through_the_rings_without_a_doubt(backend, tmp_path, monkeypatch):
    moved, real = [], Ring.transfer

    def spy(self, transfers, *, reading):
        moved.append(sum(transfer.nbytes for transfer in transfers))
        return real(self, transfers, reading=reading)

    monkeypatch.setattr(Ring, "transfer", spy)
    round_trip(backend, tmp_path / "record", NBYTES + 4096)
    assert sorted(moved) == [2 * BLOCK + 4096] * 2 + [3 * BLOCK] * 2
    assert backend.doubted_blocks == 0


@needs_uring
@pytest.mark.parametrize("answer", [0, 4096, 4097, -errno.EIO, -errno.EAGAIN, -errno.EINTR, -errno.ECANCELED])
def test_what_a_ring_does_not_move_for_sure_is_moved_again(backend, tmp_path, monkeypatch, answer):
    def move_every_other(self, transfers, *, reading):
        results = real(self, transfers[::2], reading=reading)
        return [results[number // 2] if number % 2 == 0 else answer for number in range(len(transfers))]

    real = Ring.transfer
    monkeypatch.setattr(Ring, "transfer", move_every_other)
    round_trip(backend, tmp_path / "record")
    assert backend.doubted_blocks == 4


@needs_uring
def test_a_transfer_that_never_completes_times_out_by_name_and_close_says_so(tmp_path, monkeypatch):
    answered, real = threading.Event(), Ring.transfer

    def wait_and_move(self, transfers, *, reading):
        answered.wait()
        return real(self, transfers, reading=reading)

    monkeypatch.setattr(Ring, "transfer", wait_and_move)
    backend = open_uring(timeout_s=0.01)
    completion = backend.submit(Write(tmp_path / "record", 0, aligned(PATTERN[:8192])))
    with pytest.raises(TransferTimeout, match=f"write of 8192 bytes at 0 to {tmp_path}/record has not completed"):
        completion.wait()
    with pytest.raises(TransferTimeout, match="uring still has transfers under way"):
        backend.close()
    answered.set()
    completion.timeout_s = backend.timeout_s = 60
    completion.wait()
    backend.close()
    assert (tmp_path / "record").read_bytes() == PATTERN[:8192]


@needs_uring
def test_descriptors_and_threads_stay_flat_over_many_backends(tmp_path):
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        with open_uring() as backend:
            round_trip(backend, tmp_path / "record", 8192)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


@needs_uring
def test_a_forked_child_leaves_the_rings_of_its_parent_alone(tmp_path):
    code = f"""
        import os, sys
        from pathlib import Path
        from tierstep.errors import TransferError
        from tierstep.io.buffers import PageBuffer
        from tierstep.io.requests import Write
        from tierstep.io.uring import open_uring

        backend, path, memory = open_uring(rings=1), Path({str(tmp_path)!r}) / "record", PageBuffer(8192).view
        child = os.fork()
        if not child:
            try:
                backend.submit(Write(path, 0, memory))
            except TransferError as error:
                backend.close()
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        status = os.waitpid(child, 0)[1]
        backend.submit(Write(path, 0, memory)).wait()
        backend.close()
        sys.exit(os.waitstatus_to_exitcode(status) or backend.doubted_blocks)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)


@pytest.fixture
def file(tmp_path):
    """A file of four pages of PATTERN, open for reading."""
    (tmp_path / "record").write_bytes(PATTERN[: 4 * 4096])
    descriptor = os.open(tmp_path / "record", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def read_pages(small_ring, descriptor, pages=4):
    memory = (ring.ctypes.c_char * (pages * 4096))()
    address = ring.ctypes.addressof(memory)
    transfers = [Transfer(descriptor, address + n * 4096, 4096, n * 4096) for n in range(pages)]
    return small_ring.transfer(transfers, reading=True), memory.raw


@needs_uring
def test_a_ring_is_used_again_and_again(file):
    small_ring = Ring(4)
    for _ in range(100):
        assert read_pages(small_ring, file) == ([4096] * 4, PATTERN[: 4 * 4096])
    small_ring.close()
    small_ring.close()
    with pytest.raises(ValueError, match="closed"):
        read_pages(small_ring, file)


@needs_uring
def test_a_ring_tells_short_and_failed_transfers(file):
    small_ring = Ring(8)
    assert read_pages(small_ring, file, 6)[0] == [4096] * 4 + [0] * 2
    assert read_pages(small_ring, 1 << 20)[0] == [-errno.EBADF] * 4
    small_ring.close()


@needs_uring
def test_entries_that_the_kernel_takes_one_by_one_all_go_through(file, monkeypatch):
    real = ring._system_call

    def take_one(number, descriptor, submit, wait_for, *flags):
        return real(number, descriptor, min(submit, 1), min(wait_for, 1), *flags)

    small_ring = Ring(4)
    monkeypatch.setattr(ring, "_system_call", take_one)
    assert read_pages(small_ring, file) == ([4096] * 4, PATTERN[: 4 * 4096])
    small_ring.close()


@needs_uring
def test_entries_that_the_kernel_does_not_take_are_told_and_taken_back(file, monkeypatch):
    real, left = ring._system_call, [2]

    def take_two(number, descriptor, submit, wait_for, *flags):
        if submit and not left[0]:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        taken = min(submit, left[0])
        left[0] -= taken
        return real(number, descriptor, taken, min(wait_for, taken or wait_for), *flags)

    small_ring = Ring(4)
    monkeypatch.setattr(ring, "_system_call", take_two)
    assert read_pages(small_ring, file)[0] == [4096, 4096, -errno.EBUSY, -errno.EBUSY]
    monkeypatch.undo()
    assert read_pages(small_ring, file, 2) == ([4096] * 2, PATTERN[: 2 * 4096])
    small_ring.close()


@pytest.mark.parametrize(
    ("code", "level", "reason"),
    [
        (errno.ENOSYS, "0", "Linux 5.6 or newer"),
        (errno.EPERM, "2", "switched off .*io_uring_disabled=0"),
        (errno.EPERM, "1", "one group of users.*io_uring_group"),
        (errno.EPERM, "0", "container runtimes forbid it"),
        (errno.EPERM, None, "container runtimes forbid it"),
        (errno.ENOMEM, "0", "ulimit -l"),
        (errno.EMFILE, "0", "Too many open files"),
    ],
)
def test_where_io_uring_is_refused_the_reason_is_said_in_words(tmp_path, monkeypatch, code, level, reason):
    def refuse(*arguments):
        raise OSError(code, os.strerror(code))

    if level is not None:
        (tmp_path / "io_uring_disabled").write_text(f"{level}\n")
    monkeypatch.setattr(ring, "_system_call", refuse)
    monkeypatch.setattr(ring, "DISABLED", tmp_path / "io_uring_disabled")
    with pytest.raises(ConfigError, match=f"backend uring is not available: .*{reason}.*threads works without it"):
        open_backend("uring")
    status = {s.name: s for s in describe_backends()}
    assert not status["uring"].available
    assert status["threads"].available


@needs_uring
def test_a_kernel_that_is_too_old_is_told_by_its_features(monkeypatch):
    monkeypatch.setattr(ring, "FEATURE_RW_CUR_POS", 1 << 31)
    assert "Linux 5.6 or newer" in ring.why_unavailable()
