"""The pipeline over fake processors: every subgroup once a step, no deadlock, nothing lost, whatever the plan."""

import contextlib
import errno
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstep.engine.pipeline import Pipeline
from tierstep.engine.plan import plan_step
from tierstep.engine.trace import Trace
from tierstep.errors import TransferError, TransferTimeout
from tierstep.io.faults import Fail, Hold
from tierstep.io.memory import MemoryBackend
from tierstep.tiers.nvme import NvmeTier
from tierstep.tiers.record import RecordLayout
from tierstep.tiers.resident import ResidentTier
from tierstep.tiers.slots import SlotPool
from tierstep.tiers.store import Store

LAYOUT = RecordLayout(16, (("count", torch.float32),))
FOLDER = Path("/in/memory")


class Counter:
    """A processor that counts its visits in the record itself."""

    def __init__(self, lane, barrier=None, depth=1):
        self.lane = lane
        self.barrier = barrier
        self.depth = depth
        self.started = []

    def start(self, subgroup, fields):
        self.started.append(subgroup)
        assert len(self.started) <= self.depth

        def end():
            assert self.started.pop(0) == subgroup
            if self.barrier is not None:
                self.barrier.wait(timeout=20)
            fields["count"].add_(subgroup + 1)

        return end


def open_store(homes, slots, backend):
    tiers = {name: ResidentTier(name) for name in ("device", "host")} | {"nvme": NvmeTier([FOLDER], backend)}
    store = Store(tiers, SlotPool(slots, LAYOUT.padded_nbytes), lambda *_: None)
    store.add([LAYOUT] * len(homes), homes)
    return store


def run_step(pipeline, store, touched, processors, *, backwards=False, updated=None):
    updated = [] if updated is None else updated
    plan = plan_step(store.homes(), touched, store.resident(), store.slots.count, backwards=backwards)
    pipeline.run(plan, processors, Trace(), updated.append)
    return updated


def counts(store):
    buffer = SlotPool(1, LAYOUT.padded_nbytes).acquire()
    return [store.read(index, buffer)["count"][0].item() for index in range(len(store))]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), slots=st.integers(1, 4), depths=st.lists(st.integers(1, 3), min_size=1, max_size=2))
def test_every_touched_subgroup_is_updated_once_a_step(data, slots, depths):
    homes = data.draw(st.lists(st.sampled_from(("device", "host", "nvme")), min_size=1, max_size=9))
    store = open_store(homes, slots, MemoryBackend())
    pipeline = Pipeline(store, len(depths))
    processors = [Counter(lane, depth=depth) for lane, depth in zip(("gpu", "cpu"), depths, strict=False)]
    expected = [0.0] * len(homes)
    for step in range(4):
        touched = data.draw(st.sets(st.sampled_from(range(len(homes)))))
        updated = run_step(pipeline, store, touched, processors, backwards=bool(step % 2))
        assert sorted(updated) == sorted(touched)
        for index in touched:
            expected[index] += index + 1
    pipeline.close()
    assert counts(store) == expected


@settings(max_examples=60, deadline=None)
@given(data=st.data(), slots=st.integers(1, 3), lanes=st.integers(1, 2), depth=st.integers(1, 3))
def test_a_failed_transfer_ends_the_step_and_the_rest_can_be_finished(data, slots, lanes, depth):
    homes = data.draw(st.lists(st.sampled_from(("host", "nvme")), min_size=2, max_size=8))
    backend = MemoryBackend()
    store = open_store(homes, slots, backend)
    pipeline = Pipeline(store, lanes)
    processors = [Counter(lane, depth=depth) for lane in ("gpu", "cpu")[:lanes]]
    backend.inject(Fail(errno.EIO), at=len(backend.log) + data.draw(st.integers(0, 20)))
    for step in range(3):
        updated = []
        for _ in range(2):
            remaining = set(range(len(homes))) - set(updated)
            with contextlib.suppress(TransferError):
                run_step(pipeline, store, remaining, processors, backwards=bool(step % 2), updated=updated)
        assert sorted(updated) == list(range(len(homes)))
    backend.heal()
    pipeline.close()
    assert counts(store) == [3.0 * (i + 1) for i in range(len(homes))]


def test_both_lanes_work_at_once():
    """Each update waits until the other lane is in one too, so a pipeline that takes turns would never end."""
    store = open_store(["host"] * 6, 0, MemoryBackend())
    barrier = threading.Barrier(2)
    pipeline = Pipeline(store, 2)
    run_step(pipeline, store, range(6), [Counter("gpu", barrier), Counter("cpu", barrier)])
    pipeline.close()
    assert counts(store) == [1, 2, 3, 4, 5, 6]


def test_an_error_of_a_processor_reaches_the_caller_and_gives_every_slot_back():
    class Broken(Counter):
        def start(self, subgroup, fields):
            raise ZeroDivisionError

    store = open_store(["nvme"] * 5, 2, MemoryBackend())
    pipeline = Pipeline(store, 2)
    with pytest.raises(ZeroDivisionError):
        run_step(pipeline, store, range(5), [Broken("gpu"), Broken("cpu")])
    assert sorted(run_step(pipeline, store, range(5), [Counter("gpu"), Counter("cpu")])) == [0, 1, 2, 3, 4]
    pipeline.close()


def test_a_read_that_never_ends_is_named_and_its_slot_is_not_used_meanwhile():
    """I5 (DS#4888)."""
    backend = MemoryBackend(timeout_s=0.05)
    store = open_store(["nvme"] * 3, 3, backend)
    pipeline = Pipeline(store, 1)
    run_step(pipeline, store, range(3), [Counter("cpu")])
    store.write_back(store.resident())
    store.settle()
    hold = Hold()
    backend.inject(hold, when=lambda operation: operation.kind == "read" and "000001" in str(operation.path))
    updated = []
    with pytest.raises(TransferTimeout, match=r"read of 4096 bytes .*record-000001\.slot has not completed"):
        run_step(pipeline, store, range(3), [Counter("cpu")], updated=updated)
    assert store.slots.free_count == 2 - len(store.resident())
    hold.release()
    assert store.slots.free_count == 3 - len(store.resident())
    backend.heal()
    run_step(pipeline, store, set(range(3)) - set(updated), [Counter("cpu")])
    pipeline.close()
    assert counts(store) == [2.0, 4.0, 6.0]
