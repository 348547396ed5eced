"""What the thread backend does when the system does not play along."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
from io_layer.backend_contract import PATTERN, aligned, empty

from tierstep.errors import DiskFull, TransferError, TransferTimeout
from tierstep.io.alignment import align_down
from tierstep.io.directories import BufferedFallbackWarning
from tierstep.io.requests import Read, Write
from tierstep.io.threads import ThreadBackend

REAL = {name: getattr(os, name) for name in ("preadv", "pwritev", "open", "posix_fallocate")}
NBYTES = 3 << 20


@pytest.fixture
def backend():
    with ThreadBackend(threads=2, block_bytes=1 << 20) as backend:
        yield backend


def fail_with(code):
    raise OSError(code, os.strerror(code))


def is_direct(descriptor):
    return bool(os.O_DIRECT & int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()[3], 8))


def round_trip(backend, path, data):
    backend.submit(Write(path, 0, aligned(data))).wait()
    memory = empty(len(data))
    backend.submit(Read(path, 0, memory)).wait()
    assert memory == data
    assert path.read_bytes() == data


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interrupted_transfers_are_tried_again(backend, tmp_path, monkeypatch, code):
    left = {"preadv": 5, "pwritev": 5}

    def interrupted(name, *arguments):
        left[name] -= 1
        return fail_with(code) if left[name] >= 0 else REAL[name](*arguments)

    for name in left:
        monkeypatch.setattr(os, name, lambda *arguments, name=name: interrupted(name, *arguments))
    round_trip(backend, tmp_path / "record", PATTERN[:NBYTES])
    assert max(left.values()) < 0


@pytest.mark.parametrize("step", [1 << 18, 4096, 12345])
def test_short_transfers_are_continued(backend, tmp_path, monkeypatch, step):
    def short(name, fd, parts, at):
        nbytes = align_down(step, 4096) if is_direct(fd) else step
        return REAL[name](fd, [parts[0][:nbytes]], at)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, lambda *arguments, name=name: short(name, *arguments))
    round_trip(backend, tmp_path / "record", PATTERN[: 1 << 19])


def test_a_write_that_stops_moving_says_how_far_it_came(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: REAL["pwritev"](fd, parts, at) if at < 1 << 20 else 0)
    completion = backend.submit(Write(tmp_path / "record", 0, aligned(PATTERN[:NBYTES])))
    with pytest.raises(TransferError, match=rf"stopped after \d+ of {NBYTES} bytes; is the drive full\?"):
        completion.wait()


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, TransferError)]
)
def test_errors_of_the_drive_keep_errno_and_path(backend, tmp_path, monkeypatch, code, kind):
    monkeypatch.setattr(os, "pwritev", lambda *arguments: fail_with(code))
    completion = backend.submit(Write(tmp_path / "record", 0, aligned(PATTERN[:NBYTES])))
    with pytest.raises(kind, match=errno.errorcode[code]) as caught:
        completion.wait()
    assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / "record"))
    monkeypatch.undo()
    round_trip(backend, tmp_path / "record", PATTERN[:NBYTES])


def test_a_file_size_limit_is_reported_and_lifting_it_gives_the_same_bits(tmp_path):
    code = f"""
        import errno, resource
        from pathlib import Path
        from tierstep.errors import TransferError
        from tierstep.io.buffers import PageBuffer
        from tierstep.io.requests import Write
        from tierstep.io.threads import ThreadBackend

        path, data = Path({str(tmp_path)!r}) / "record", bytes(range(256)) * (3 << 12)
        memory = PageBuffer(len(data)).view
        memory[:] = data
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with ThreadBackend(threads=2, block_bytes=1 << 20) as backend:
            resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 20) + 4096, hard))
            for attempt in (
                lambda: backend.submit(Write(path, 0, memory)).wait(),
                lambda: backend.allocate(path.with_name("other"), len(data)),
            ):
                try:
                    attempt()
                except TransferError as error:
                    assert error.errno == errno.EFBIG, error
                    assert "ulimit -f" in str(error), error
                else:
                    raise SystemExit("the limit went unnoticed")
            assert not path.with_name("other").exists()
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            backend.submit(Write(path, 0, memory)).wait()
            assert path.read_bytes() == data
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_transfer_that_never_completes_times_out_by_name_and_close_says_so(tmp_path, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(os, "pwritev", lambda *arguments: answered.wait() and REAL["pwritev"](*arguments))
    backend = ThreadBackend(threads=1, timeout_s=0.01)
    completion = backend.submit(Write(tmp_path / "record", 0, aligned(PATTERN[:8192])))
    with pytest.raises(TransferTimeout, match=f"write of 8192 bytes at 0 to {tmp_path}/record has not completed"):
        completion.wait()
    with pytest.raises(TransferTimeout, match="still has transfers under way"):
        backend.close()
    answered.set()
    completion.timeout_s = backend.timeout_s = 60
    completion.wait()
    backend.close()
    assert (tmp_path / "record").read_bytes() == PATTERN[:8192]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_o_direct_refused_only_by_transfers_warns_once_a_directory(backend, tmp_path, monkeypatch, code):
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(
            os, name, lambda fd, *rest, name=name: fail_with(code) if is_direct(fd) else REAL[name](fd, *rest)
        )
    check_one_warning_a_directory(backend, tmp_path)


def test_o_direct_refused_at_opening_warns_once_a_directory(backend, tmp_path, monkeypatch):
    def open_ordinary_files(path, flags, *mode):
        return fail_with(errno.EINVAL) if flags & os.O_DIRECT else REAL["open"](path, flags, *mode)

    monkeypatch.setattr(os, "open", open_ordinary_files)
    check_one_warning_a_directory(backend, tmp_path)


def check_one_warning_a_directory(backend, tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for directory in directories:
            directory.mkdir()
            for number in range(4):
                round_trip(backend, directory / f"record-{number}", PATTERN[: NBYTES + number])
    assert [warning.category for warning in caught] == [BufferedFallbackWarning] * 2
    assert [str(directory) in str(w.message) for directory, w in zip(directories, caught, strict=True)] == [True, True]


def test_aligned_transfers_go_past_the_page_cache_and_the_rest_does_not(backend, tmp_path, monkeypatch):
    seen = []

    def spy(fd, parts, at):
        seen.append((is_direct(fd), at, parts[0].nbytes))
        return REAL["pwritev"](fd, parts, at)

    monkeypatch.setattr(os, "pwritev", spy)
    (tmp_path / "record").touch()
    backend.submit(Write(tmp_path / "record", 100, aligned(PATTERN[:20000], 100))).wait()
    assert seen == [(False, 100, 3996), (True, 4096, 12288), (False, 16384, 3716)]


def test_descriptors_and_threads_stay_flat_over_500_operations(backend, tmp_path):
    round_trip(backend, tmp_path / "record", PATTERN[:10000])
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(250):
        path = tmp_path / f"record-{number % 20}"
        backend.submit(Write(path, 0, aligned(PATTERN[:9000]))).wait()
        with pytest.raises(TransferError):
            backend.submit(Read(path, 0, empty(9001))).wait()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    backend.close()


def test_a_full_drive_is_known_at_allocation_and_leaves_no_file_behind(backend, tmp_path, monkeypatch):
    (tmp_path / "old").write_bytes(PATTERN[:5000])

    def reserve_half(descriptor, offset, nbytes):
        os.ftruncate(descriptor, nbytes // 2)
        fail_with(errno.ENOSPC)

    monkeypatch.setattr(os, "posix_fallocate", reserve_half)
    for name in ("new", "old"):
        with pytest.raises(DiskFull, match=r"allocation of 12345 bytes for .*; \d+ bytes are free"):
            backend.allocate(tmp_path / name, 12345)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old").read_bytes() == PATTERN[:5000]


def test_allocation_works_where_the_system_cannot_reserve(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: fail_with(errno.EOPNOTSUPP))
    (tmp_path / "record").write_bytes(PATTERN[:5000])
    backend.allocate(tmp_path / "record", 3_000_001)
    assert (tmp_path / "record").read_bytes() == PATTERN[:5000] + bytes(3_000_001 - 5000)


def test_a_forked_child_is_refused_instead_of_waiting_for_threads_that_it_lacks(tmp_path):
    code = f"""
        import os, sys
        from pathlib import Path
        from tierstep.errors import TransferError
        from tierstep.io.requests import Write
        from tierstep.io.threads import ThreadBackend

        backend = ThreadBackend(threads=1)
        child = os.fork()
        if not child:
            try:
                backend.submit(Write(Path({str(tmp_path)!r}) / "record", 0, memoryview(bytearray(1))))
            except TransferError as error:
                backend.close()
                os._exit(0 if "fork" in str(error) else 1)
            os._exit(2)
        status = os.waitpid(child, 0)[1]
        backend.close()
        sys.exit(os.waitstatus_to_exitcode(status))
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], check=True)
