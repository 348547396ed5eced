"""The store: who is where, and what stays true when a transfer fails."""

import errno

import pytest
import torch

from tierstep.errors import StepInterrupted, TransferError, TransferTimeout
from tierstep.io.faults import Fail, Hold
from tierstep.io.memory import MemoryBackend
from tierstep.tiers.nvme import NvmeTier
from tierstep.tiers.record import RecordLayout
from tierstep.tiers.resident import ResidentTier
from tierstep.tiers.slots import SlotPool
from tierstep.tiers.store import Store

LAYOUT = RecordLayout(100, (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)))


@pytest.fixture
def backend():
    return MemoryBackend()


@pytest.fixture
def moved():
    return []


@pytest.fixture
def store(backend, moved, tmp_path):
    tiers = {"host": ResidentTier("host"), "nvme": NvmeTier([tmp_path], backend)}
    store = Store(tiers, SlotPool(2, LAYOUT.padded_nbytes), lambda lane, index, *_: moved.append((lane, index)))
    store.add([LAYOUT] * 4, ["host", "nvme", "nvme", "nvme"])
    return store


def change(store, index, value, *, keep=False):
    store.fetch(index).wait()
    store.take(index)["exp_avg"].fill_(value)
    store.put_back(index, changed=True, keep=keep)


def fail_next(backend, kind):
    """Fail the next read or write, and no other."""
    struck = []

    def is_next(operation):
        if operation.kind != kind or struck:
            return False
        struck.append(operation)
        return True

    backend.inject(Fail(errno.EIO), when=is_next)


def value_of(store, index):
    buffer = SlotPool(1, LAYOUT.padded_nbytes).acquire()
    return store.read(index, buffer)["exp_avg"][0].item()


@pytest.mark.parametrize("index", [0, 1])
def test_a_fresh_record_is_zero_and_nothing_is_read_for_it(store, moved, index):
    store.fetch(index).wait()
    assert not store.take(index)["exp_avg"].any()
    assert moved == []


def test_a_changed_cold_record_is_written_and_read_again(store, moved):
    change(store, 1, 5.0)
    store.settle()
    store.fetch(1).wait()
    assert store.take(1)["exp_avg"].eq(5).all()
    assert moved == [("write", 1), ("read", 1)]


def test_a_kept_record_is_neither_written_nor_read_again(store, moved):
    change(store, 1, 5.0, keep=True)
    store.fetch(1).wait()
    assert store.take(1)["exp_avg"].eq(5).all()
    assert moved == []


def test_an_unchanged_record_gives_its_slot_back_without_a_write(store, moved):
    for _ in range(5):
        store.fetch(1).wait()
        store.put_back(1, changed=False)
    assert moved == []


def test_a_failed_write_keeps_the_record_in_its_slot_and_can_be_repeated(store, backend):
    fail_next(backend, "write")
    change(store, 1, 7.0)
    with pytest.raises(TransferError):
        store.settle()
    assert store.resident() == (1,)
    assert value_of(store, 1) == 7.0
    store.write_back([1])
    store.settle()
    assert store.resident() == ()
    assert value_of(store, 1) == 7.0


def test_a_failed_write_wakes_whoever_waits_for_a_slot(store, backend):
    change(store, 1, 1.0, keep=True)
    fail_next(backend, "write")
    change(store, 2, 1.0)
    with pytest.raises(StepInterrupted):
        store.fetch(3)
    with pytest.raises(TransferError):
        store.settle()


def test_a_failed_read_gives_its_slot_back(store, backend):
    change(store, 1, 1.0)
    store.settle()
    for _ in range(3):
        fail_next(backend, "read")
        with pytest.raises(TransferError):
            store.fetch(1).wait()
        store.put_back(1, changed=False)
    assert value_of(store, 1) == 1.0


def test_other_slots_get_the_residents_written_back(store):
    change(store, 1, 3.0, keep=True)
    store.replace_slots(SlotPool(1, LAYOUT.padded_nbytes))
    assert store.resident() == ()
    assert value_of(store, 1) == 3.0


def test_writing_a_record_from_outside_replaces_what_a_slot_holds(store):
    change(store, 1, 3.0, keep=True)
    buffer = SlotPool(1, LAYOUT.padded_nbytes).acquire()
    LAYOUT.views(buffer.tensor)["exp_avg"].fill_(9.0)
    store.write(1, buffer)
    assert value_of(store, 1) == 9.0
    assert store.resident() == ()


def test_a_drive_that_stops_answering_is_an_error_even_for_whoever_waits_for_a_slot(tmp_path):
    backend = MemoryBackend(timeout_s=0.05)
    store = Store({"nvme": NvmeTier([tmp_path], backend)}, SlotPool(1, LAYOUT.padded_nbytes), lambda *_: None)
    store.add([LAYOUT] * 2, ["nvme", "nvme"])
    hold = Hold()
    backend.inject(hold, when=lambda operation: operation.kind == "write")
    change(store, 0, 1.0)
    with pytest.raises(TransferTimeout, match=r"write of 4096 bytes .*record-000000"):
        store.fetch(1)
    hold.release()
    store.settle()
    change(store, 1, 2.0)
    store.settle()
    assert (value_of(store, 0), value_of(store, 1)) == (1.0, 2.0)


def test_a_store_that_ends_late_does_not_replace_what_was_written_after_it(tmp_path):
    backend = MemoryBackend(timeout_s=0.05)
    store = Store({"nvme": NvmeTier([tmp_path], backend)}, SlotPool(1, LAYOUT.padded_nbytes), lambda *_: None)
    store.add([LAYOUT], ["nvme"])
    hold = Hold()
    backend.inject(hold, when=lambda operation: operation.kind == "write")
    change(store, 0, 7.0)
    buffer = SlotPool(1, LAYOUT.padded_nbytes).acquire()
    LAYOUT.views(buffer.tensor)["exp_avg"].fill_(9.0)
    with pytest.raises(TransferTimeout):
        store.write(0, buffer)
    hold.release()
    store.write(0, buffer)
    assert value_of(store, 0) == 9.0


def test_a_record_that_is_reset_is_fresh_wherever_it_was(store, moved):
    change(store, 0, 3.0)
    change(store, 1, 3.0)
    change(store, 2, 3.0, keep=True)
    store.settle()
    moved.clear()
    for index in (0, 1, 2):
        store.reset(index)
        assert store.is_fresh(index)
        assert value_of(store, index) == 0.0
    assert moved == []
