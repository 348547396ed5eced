"""What every I/O backend promises, as one suite that each of them subclasses."""

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstep.errors import ConfigError, TransferError
from tierstep.io.backend import IoBackend
from tierstep.io.buffers import PageBuffer
from tierstep.io.requests import Read, Write

MIB = 1 << 20
SIZES = [0, 1, 3, 127, 511, 512, 513, 4095, 4096, 4097, 10**6 + 1, 9 * MIB, 9 * MIB + 5]
PATTERN = os.urandom(10 * MIB)


def aligned(data: bytes, shift: int = 0) -> memoryview:
    """Return a writable copy of `data` that starts `shift` bytes behind a page."""
    memory = PageBuffer(len(data) + shift).view[shift:]
    memory[:] = data
    return memory


def empty(nbytes: int, shift: int = 0) -> memoryview:
    return aligned(b"\xa5" * nbytes, shift)


class BackendContract:
    """Subclasses give the fixtures `backend` (open) and `directory`, and say how a file is looked at."""

    def length(self, backend: IoBackend, path: Path) -> int:
        return path.stat().st_size

    def exists(self, backend: IoBackend, path: Path) -> bool:
        return path.exists()

    def unwritable(self, backend: IoBackend, directory: Path) -> Path:
        """Return a path to which no byte can be written."""
        path = directory / "folder"
        path.mkdir()
        return path

    def write(self, backend, path, offset, data, shift=0):
        backend.submit(Write(path, offset, aligned(data, shift))).wait()

    def read(self, backend, path, offset, nbytes, shift=0):
        memory = empty(nbytes, shift)
        backend.submit(Read(path, offset, memory)).wait()
        return bytes(memory)

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_any_size_comes_back_equal_and_the_file_has_exactly_that_length(self, backend, directory, nbytes):
        path = directory / "record"
        self.write(backend, path, 0, PATTERN[:nbytes])
        assert self.length(backend, path) == nbytes
        assert self.read(backend, path, 0, nbytes) == PATTERN[:nbytes]

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_an_allocated_file_keeps_its_length_when_it_is_written(self, backend, directory, nbytes):
        path = directory / "record"
        backend.allocate(path, nbytes)
        assert self.length(backend, path) == nbytes
        self.write(backend, path, 0, PATTERN[:nbytes])
        assert self.length(backend, path) == nbytes
        assert self.read(backend, path, 0, nbytes) == PATTERN[:nbytes]

    @pytest.mark.parametrize("shift", [1, 64, 511, 4095])
    def test_a_buffer_at_any_address_is_accepted(self, backend, directory, shift):
        path = directory / "record"
        self.write(backend, path, 0, PATTERN[: 2 * MIB], shift)
        assert self.read(backend, path, 0, 2 * MIB, 4096 - shift) == PATTERN[: 2 * MIB]

    def test_a_write_anywhere_changes_its_own_bytes_and_no_other(self, backend, directory):
        path = directory / "any"

        @settings(max_examples=25, deadline=None)
        @given(offset=st.integers(0, 20000), nbytes=st.integers(0, 5 * MIB), shift=st.integers(0, 5000))
        def check(offset, nbytes, shift):
            total = offset + nbytes + 3000
            backend.remove(path)
            self.write(backend, path, 0, b"\x11" * total)
            self.write(backend, path, offset, PATTERN[:nbytes], shift)
            assert self.length(backend, path) == total
            everything = self.read(backend, path, 0, total, shift)
            assert everything == b"\x11" * offset + PATTERN[:nbytes] + b"\x11" * 3000
            assert self.read(backend, path, offset, nbytes, offset % 4096) == PATTERN[:nbytes]

        check()

    def test_buffers_of_other_element_types_move_as_bytes(self, backend, directory):
        numbers = memoryview(bytearray(PATTERN[:8000])).cast("d")
        backend.submit(Write(directory / "record", 0, numbers)).wait()
        assert self.read(backend, directory / "record", 0, 8000) == PATTERN[:8000]

    def test_constant_bytes_can_be_written(self, backend, directory):
        backend.allocate(directory / "record", 5 * MIB)
        backend.submit(Write(directory / "record", 0, memoryview(PATTERN[: 5 * MIB]))).wait()
        assert self.read(backend, directory / "record", 0, 5 * MIB) == PATTERN[: 5 * MIB]

    def test_overwriting_with_the_same_and_with_other_bytes(self, backend, directory):
        path = directory / "record"
        backend.allocate(path, 5 * MIB)
        for data in (bytes(5 * MIB), PATTERN[: 5 * MIB], PATTERN[: 5 * MIB], bytes(5 * MIB)):
            self.write(backend, path, 0, data)
            assert self.read(backend, path, 0, 5 * MIB) == data

    def test_many_requests_are_in_flight_at_once(self, backend, directory):
        path, part = directory / "record", 64 * 1024 + 4096
        backend.allocate(path, 60 * part)
        writes = [
            backend.submit(Write(path, i * part, aligned(PATTERN[i * 7 : i * 7 + part]))) for i in reversed(range(60))
        ]
        for completion in writes:
            completion.wait()
        memories = [empty(part) for _ in range(60)]
        reads = [backend.submit(Read(path, i * part, memory)) for i, memory in enumerate(memories)]
        for i, completion in enumerate(reads):
            completion.wait()
            assert memories[i] == PATTERN[i * 7 : i * 7 + part]

    def test_several_threads_share_a_backend(self, backend, directory):
        wrong = []

        def work(number):
            path, data = directory / f"record-{number}", PATTERN[number : number + MIB + number]
            for _ in range(3):
                self.write(backend, path, 0, data)
                wrong.extend([number] if self.read(backend, path, 0, len(data)) != data else [])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 4097), (0, 8192), (4096, 4096), (4000, 97), (4096, 1)])
    def test_reading_past_the_end_fails_with_both_numbers(self, backend, directory, offset, nbytes):
        path = directory / "record"
        self.write(backend, path, 0, PATTERN[:4096])
        completion = backend.submit(Read(path, offset, empty(nbytes)))
        with pytest.raises(
            TransferError, match=rf"read of {nbytes} bytes at {offset} .* stopped after \d+ of {nbytes}"
        ):
            completion.wait()

    def test_reading_a_missing_file_names_it(self, backend, directory):
        completion = backend.submit(Read(directory / "missing", 0, empty(10)))
        with pytest.raises(TransferError, match="missing") as caught:
            completion.wait()
        assert caught.value.filename == str(directory / "missing")
        assert caught.value.errno == 2

    def test_a_failing_write_has_errno_and_path(self, backend, directory):
        path = self.unwritable(backend, directory)
        completion = backend.submit(Write(path, 0, empty(4096)))
        with pytest.raises(TransferError, match=f"write of 4096 bytes at 0 to {path} failed") as caught:
            completion.wait()
        assert caught.value.errno
        assert caught.value.filename == str(path)

    def test_waiting_twice_gives_the_same_outcome(self, backend, directory):
        good = backend.submit(Write(directory / "record", 0, empty(10)))
        good.wait()
        good.wait()
        bad = backend.submit(Read(directory / "missing", 0, empty(10)))
        outcomes = []
        for _ in range(2):
            with pytest.raises(TransferError) as caught:
                bad.wait()
            outcomes.append(caught.value)
        assert outcomes[0] is outcomes[1] is bad.error

    def test_callbacks_run_once_each_before_or_after_the_end(self, backend, directory):
        called, all_called = [], threading.Event()
        completion = backend.submit(Write(directory / "record", 0, empty(MIB)))
        completion.add_done_callback(lambda c: called.append(c.done()))
        completion.add_done_callback(lambda c: all_called.set())
        assert all_called.wait(30)
        completion.add_done_callback(lambda c: called.append(c.done()))
        assert called == [True, True]

    def test_close_waits_for_what_is_in_flight(self, backend, directory):
        completions = [backend.submit(Write(directory / f"r{i}", 0, empty(MIB))) for i in range(20)]
        backend.close()
        assert all(completion.done() for completion in completions)
        assert [completion.error for completion in completions] == [None] * 20

    def test_nothing_is_taken_after_close(self, backend, directory):
        backend.close()
        backend.close()
        with pytest.raises(TransferError, match="closed"):
            backend.submit(Read(directory / "record", 0, empty(1)))

    def test_a_with_block_closes(self, backend, directory):
        with backend as same:
            assert same is backend
        with pytest.raises(TransferError, match="closed"):
            backend.submit(Read(directory / "record", 0, empty(1)))

    def test_allocation_resizes_and_keeps_the_common_bytes(self, backend, directory):
        path = directory / "record"
        self.write(backend, path, 0, PATTERN[:10000])
        for nbytes in (10000, 4097, 20000):
            backend.allocate(path, nbytes)
            assert self.length(backend, path) == nbytes
            assert self.read(backend, path, 0, 4097) == PATTERN[:4097]

    def test_removal_deletes_and_does_not_mind_absence(self, backend, directory):
        backend.allocate(directory / "record", 10)
        backend.remove(directory / "record")
        backend.remove(directory / "record")
        assert not self.exists(backend, directory / "record")

    def test_a_link_is_a_second_name_of_the_same_bytes(self, backend, directory):
        first, second = directory / "first", directory / "second"
        self.write(backend, first, 0, PATTERN[:5000])
        assert backend.link_count(first) == 1
        assert backend.link(first, second)
        assert backend.link_count(first) == backend.link_count(second) == 2
        assert self.read(backend, second, 0, 5000) == PATTERN[:5000]
        self.write(backend, first, 1000, PATTERN[7000:8000])
        changed = PATTERN[:1000] + PATTERN[7000:8000] + PATTERN[2000:5000]
        assert self.read(backend, second, 0, 5000) == self.read(backend, first, 0, 5000) == changed

    def test_resizing_a_file_resizes_it_under_every_name(self, backend, directory):
        first, second = directory / "first", directory / "second"
        self.write(backend, first, 0, PATTERN[:5000])
        backend.link(first, second)
        for nbytes in (3000, 9000):
            backend.allocate(first, nbytes)
            assert self.length(backend, first) == self.length(backend, second) == nbytes
        assert backend.link_count(first) == 2

    @pytest.mark.parametrize(("removed", "left"), [("first", "second"), ("second", "first")])
    def test_removing_one_name_leaves_the_other(self, backend, directory, removed, left):
        self.write(backend, directory / "first", 0, PATTERN[:5000])
        backend.link(directory / "first", directory / "second")
        backend.remove(directory / removed)
        assert not self.exists(backend, directory / removed)
        assert backend.link_count(directory / left) == 1
        assert self.read(backend, directory / left, 0, 5000) == PATTERN[:5000]

    def test_a_link_replaces_no_file(self, backend, directory):
        first, second = directory / "first", directory / "second"
        self.write(backend, first, 0, PATTERN[:5000])
        self.write(backend, second, 0, PATTERN[5000:6000])
        with pytest.raises(TransferError, match=f"link of {first} to {second}") as caught:
            backend.link(first, second)
        assert caught.value.errno == errno.EEXIST
        assert self.read(backend, second, 0, 1000) == PATTERN[5000:6000]
        assert backend.link_count(first) == backend.link_count(second) == 1

    def test_a_missing_file_can_neither_be_linked_nor_counted(self, backend, directory):
        with pytest.raises(TransferError, match="link of .*missing") as caught:
            backend.link(directory / "missing", directory / "second")
        assert caught.value.errno == errno.ENOENT
        assert not self.exists(backend, directory / "second")
        with pytest.raises(TransferError, match="missing") as caught:
            backend.link_count(directory / "missing")
        assert caught.value.errno == errno.ENOENT

    def test_an_unusable_request_is_refused_at_once(self, directory):
        with pytest.raises(ConfigError, match="negative"):
            Write(directory / "record", -1, empty(1))
        with pytest.raises(ConfigError, match="read-only"):
            Read(directory / "record", 0, memoryview(b"constant"))
        with pytest.raises(ConfigError, match="gaps"):
            Write(directory / "record", 0, empty(10)[::2])
