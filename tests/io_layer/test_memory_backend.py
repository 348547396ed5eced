"""The faults that other tests rely on."""

import errno
import threading

import pytest
from io_layer.backend_contract import PATTERN, aligned, empty

from tierstep.errors import DiskFull, TransferError, TransferTimeout
from tierstep.io.memory import Fail, Hold, Interrupt, MemoryBackend, Short
from tierstep.io.requests import Read, Write


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record"


def test_a_fault_strikes_the_operation_with_its_number_only(path):
    backend = MemoryBackend()
    backend.inject(Fail(errno.EIO), at=1)
    completions = [backend.submit(Write(path, 0, aligned(PATTERN[:10]))) for _ in range(3)]
    assert [getattr(completion.error, "errno", None) for completion in completions] == [None, errno.EIO, None]


def test_a_fault_strikes_what_its_condition_names_until_it_heals(path):
    backend = MemoryBackend()
    backend.inject(Fail(errno.ENOSPC), when=lambda operation: operation.kind == "allocate" and operation.nbytes > 10)
    backend.allocate(path, 10)
    with pytest.raises(DiskFull):
        backend.allocate(path, 11)
    backend.heal()
    backend.allocate(path, 11)


def test_removals_can_fail(path):
    backend = MemoryBackend()
    backend.inject(Fail(errno.EACCES), at=0)
    with pytest.raises(TransferError, match="removal of .*EACCES"):
        backend.remove(path)


@pytest.mark.parametrize("kind", [Read, Write])
def test_a_short_transfer_is_an_error(path, kind):
    backend = MemoryBackend()
    backend.allocate(path, 100)
    backend.inject(Short(30), at=1)
    with pytest.raises(TransferError, match="stopped after 30 of 100 bytes"):
        backend.submit(kind(path, 0, empty(100))).wait()


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interruptions_are_survived(path, code):
    backend = MemoryBackend()
    backend.inject(Interrupt(7, code))
    backend.submit(Write(path, 0, aligned(PATTERN[:10]))).wait()
    assert backend.files[path] == PATTERN[:10]


def test_endless_interruptions_are_an_error(path):
    backend = MemoryBackend()
    backend.inject(Interrupt(10**9))
    with pytest.raises(TransferError, match="EINTR"):
        backend.submit(Write(path, 0, aligned(PATTERN[:10]))).wait()


def test_held_transfers_move_nothing_until_they_are_released_in_order(path):
    backend, hold, ended = MemoryBackend(), Hold(), []
    backend.inject(hold, when=lambda operation: operation.kind == "write")
    for number in range(3):
        completion = backend.submit(Write(path, number, aligned(bytes([number]))))
        completion.add_done_callback(lambda c: ended.append(c.request.offset))
    assert (hold.held_count, ended, path in backend.files) == (3, [], False)
    hold.release()
    assert ended == [0, 1, 2]
    assert backend.files[path] == b"\x00\x01\x02"
    backend.submit(Write(path, 3, aligned(b"\x03"))).wait()


def test_a_transfer_that_is_never_released_times_out_and_so_does_close(path):
    backend = MemoryBackend(timeout_s=0.001)
    backend.inject(Hold())
    completion = backend.submit(Write(path, 0, empty(10)))
    with pytest.raises(TransferTimeout, match="write of 10 bytes at 0"):
        completion.wait()
    with pytest.raises(TransferTimeout, match="1 transfers under way"):
        backend.close()


def test_close_waits_for_held_transfers(path):
    backend, hold = MemoryBackend(), Hold()
    backend.inject(hold)
    completion = backend.submit(Write(path, 0, empty(10)))
    closing = threading.Thread(target=backend.close)
    closing.start()
    assert not completion.done()
    hold.release()
    closing.join()
    assert completion.done()


def test_a_drive_of_limited_size_fills_up_and_loses_nothing(path):
    backend = MemoryBackend(capacity_bytes=100)
    backend.allocate(path, 60)
    with pytest.raises(DiskFull, match="41 more bytes are needed and 40 are free"):
        backend.allocate(path.with_name("other"), 41)
    assert path.with_name("other") not in backend.files
    backend.submit(Write(path, 0, aligned(PATTERN[:60]))).wait()
    with pytest.raises(DiskFull):
        backend.submit(Write(path, 60, empty(41))).wait()
    assert backend.files[path] == PATTERN[:60]


def test_the_log_has_every_operation_in_order(path):
    backend = MemoryBackend()
    backend.allocate(path, 8)
    backend.submit(Write(path, 2, empty(4))).wait()
    backend.submit(Read(path, 1, empty(3))).wait()
    backend.remove(path)
    seen = [(o.index, o.kind, o.offset, o.nbytes) for o in backend.log]
    assert seen == [(0, "allocate", 0, 8), (1, "write", 2, 4), (2, "read", 1, 3), (3, "remove", 0, 0)]
