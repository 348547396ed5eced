"""The watch over DeepSpeed's handle, held against handles that fail as the real one does: saying nothing."""

import os

import pytest
import torch
from io_layer.backend_contract import PATTERN, aligned, empty

from tierstep.errors import TransferError
from tierstep.io.files import RequestFile
from tierstep.io.guards import BLOCK_BYTES, GuardedHandle
from tierstep.io.requests import Read, Write

NBYTES = 2 * BLOCK_BYTES + 8192
DATA = PATTERN[:4096] * (NBYTES // 4096)


def as_tensor(memory):
    return torch.frombuffer(memory, dtype=torch.uint8)


class FakeHandle:
    """DeepSpeed's handle as it fails: `moves(start, stop)` says how much of a block moves; the answer is always 1."""

    def __init__(self, *, pinned=False, answer=1):
        self.pinned = pinned
        self.answer = answer
        self.calls = 0
        self.moves = lambda start, stop: stop

    def sync_pread(self, buffer, filename, file_offset):
        return self._move(buffer, filename, file_offset, os.preadv, os.O_RDONLY)

    def sync_pwrite(self, buffer, filename, file_offset):
        return self._move(buffer, filename, file_offset, os.pwritev, os.O_WRONLY)

    def _move(self, buffer, filename, file_offset, operation, access):
        self.calls += 1
        descriptor = os.open(filename, access)
        for start in range(0, buffer.numel(), BLOCK_BYTES):
            stop = self.moves(start, min(start + BLOCK_BYTES, buffer.numel()))
            if stop > start:
                operation(descriptor, [memoryview(buffer.numpy())[start:stop]], file_offset + start)
        os.close(descriptor)
        return self.answer

    def is_pinned(self, buffer):
        return self.pinned

    def new_cpu_locked_tensor(self, num_elem, example):
        return torch.zeros(num_elem, dtype=torch.uint8)

    def free_cpu_locked_tensor(self, locked):
        return True


@pytest.fixture(params=[False, True], ids=["copied", "in place"])
def fake(request):
    return FakeHandle(pinned=request.param)


@pytest.fixture
def handle(fake):
    handle = GuardedHandle(fake, as_tensor)
    yield handle
    handle.close()


@pytest.fixture
def path(tmp_path):
    (tmp_path / "record").write_bytes(bytes(NBYTES))
    return tmp_path / "record"


def move(handle, request):
    file = RequestFile(request, lambda directory, reason: pytest.fail(reason))
    if file.direct is None:
        pytest.skip("this file system takes no O_DIRECT")
    try:
        handle.move(file, 0, request.buffer.nbytes)
    finally:
        file.close()


def test_transfers_that_go_well_are_not_doubted(fake, handle, path):
    memory = empty(NBYTES)
    move(handle, Write(path, 0, aligned(DATA)))
    move(handle, Read(path, 0, memory))
    assert path.read_bytes() == memory == DATA
    assert (handle.doubted_blocks, fake.calls) == (0, 2)


@pytest.mark.parametrize("moved", [0, 4096, BLOCK_BYTES // 2, BLOCK_BYTES - 4096])
def test_a_block_that_was_written_in_part_is_written_again(fake, handle, path, moved):
    fake.moves = lambda start, stop: start + moved if start == BLOCK_BYTES else stop
    move(handle, Write(path, 0, aligned(DATA)))
    assert path.read_bytes() == DATA
    assert handle.doubted_blocks == 1


@pytest.mark.parametrize("moved", [0, 4096, BLOCK_BYTES // 2, BLOCK_BYTES - 4096])
def test_a_block_that_was_read_in_part_is_read_again(fake, handle, path, moved):
    path.write_bytes(DATA)
    fake.moves = lambda start, stop: start + moved if start == BLOCK_BYTES else stop
    memory = empty(NBYTES)
    move(handle, Read(path, 0, memory))
    assert memory == DATA
    assert handle.doubted_blocks == 1


def test_a_read_of_bytes_that_the_buffer_holds_already_is_not_mistaken_for_a_read(fake, handle, path):
    fake.moves = lambda start, stop: start
    memory = aligned(bytes(NBYTES))
    move(handle, Read(path, 0, memory))
    assert memory == bytes(NBYTES)
    assert handle.doubted_blocks == 3


def test_a_write_whose_last_sectors_are_there_already_is_not_left_to_libaio(fake, handle, path):
    """Bytes as before at the end of each block would pass for written; the front differs."""
    fake.moves = lambda start, stop: start
    data = bytearray(DATA)
    for stop in (BLOCK_BYTES, 2 * BLOCK_BYTES, NBYTES):
        data[stop - 4096 : stop] = bytes(4096)
    move(handle, Write(path, 0, aligned(data)))
    assert path.read_bytes() == data
    assert fake.calls == 0


@pytest.mark.parametrize("moves", [lambda start, stop: start, lambda start, stop: stop], ids=["nothing", "all"])
@pytest.mark.parametrize("kind", [Read, Write])
def test_a_handle_that_refuses_is_replaced_by_the_reference_code(fake, handle, path, kind, moves):
    fake.answer, fake.moves = -1, moves
    path.write_bytes(DATA if kind is Read else bytes(NBYTES))
    memory = empty(NBYTES) if kind is Read else aligned(DATA)
    move(handle, kind(path, 0, memory))
    assert path.read_bytes() == memory == DATA
    assert handle.doubted_blocks == 3


def test_what_the_file_does_not_have_is_not_asked_of_libaio(fake, handle, path):
    """It aborts the process when it reads past the end, and truncates when it fills a drive."""
    with pytest.raises(TransferError, match=f"the file ends at byte {NBYTES}"):
        move(handle, Read(path, 4096, empty(NBYTES)))
    move(handle, Write(path, 4096, aligned(DATA)))
    assert path.read_bytes() == bytes(4096) + DATA
    assert fake.calls == 0


def test_constant_bytes_are_not_shown_to_libaio(fake, handle, path):
    page_aligned = aligned(DATA).toreadonly()
    move(handle, Write(path, 0, page_aligned))
    assert path.read_bytes() == DATA
    assert fake.calls == 0
