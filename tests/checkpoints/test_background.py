"""C4: a save goes on in the background, and what it writes are the values of the call."""

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import tierstep
from tierstep import Tiers
from tierstep.engine.pending import PendingSave
from tierstep.errors import DiskFull
from tierstep.io.threads import ThreadBackend

from training_runs import OPTIONS, make_parameters, outcome, set_gradients, train

HALF = 4
LAYOUTS = {
    "host": dict(ram=1 << 20),
    "host, many records": dict(ram=1 << 20, subgroup=70),
    "device": dict(gpu=1 << 20, ram=0),
    "nvme": dict(ram=8 << 10, subgroup=900),
    "mixed": dict(gpu=2500, ram=9_500, subgroup=1000, slots=2),
}


def start(path, layout, seed=0):
    path.mkdir(exist_ok=True)
    parameters = make_parameters(seed)
    tiers = Tiers(**{"gpu": 0, "nvme": [path], **LAYOUTS[layout]})
    return parameters, tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers)


def restored(tmp_path, path):
    """All state of a checkpoint, read into another optimizer."""
    parameters, optimizer = start(tmp_path / "other", "host", seed=1)
    with optimizer:
        tierstep.Checkpoints(path.parent).restore(optimizer=optimizer, path=path)
        return state_of(optimizer, parameters)


def state_of(optimizer, parameters):
    return {key: value for key, value in outcome(optimizer, parameters).items() if not key.startswith("weight")}


class Gate(ThreadBackend):
    """Lets writes of checkpoints through when it is opened; fails them when it was broken."""

    opened: threading.Event
    broken = False

    def submit(self, request):
        if not self.opened.wait(timeout=60):
            raise AssertionError("nobody opened the gate: training waited for the save")
        if self.broken:
            raise DiskFull("no space left, says the gate", path=request.path, errno=errno.ENOSPC)
        return super().submit(request)


@pytest.fixture
def gate(monkeypatch):
    class OwnGate(Gate):
        opened = threading.Event()

    monkeypatch.setattr("tierstep.engine.checkpoint.open_backend", lambda name: OwnGate())
    yield OwnGate
    OwnGate.opened.set()


@pytest.fixture
def waited_for(gate, monkeypatch):
    """Opens the gate when somebody waits for a save, and no sooner; lists the saves that were waited for."""
    saves, wait = [], PendingSave.join

    def open_gate_and_join(pending):
        if pending not in saves:
            saves.append(pending)
        gate.opened.set()
        return wait(pending)

    monkeypatch.setattr(PendingSave, "join", open_gate_and_join)
    return saves


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_on_does_not_change_what_is_saved(tmp_path, layout):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints", keep=None)
    parameters, optimizer = start(tmp_path / "nvme", layout)
    saved = []
    with optimizer:
        for step in range(0, 5 * HALF, HALF):
            train(optimizer, parameters, step, step + HALF)
            saved.append((checkpoints.save(step + HALF, optimizer=optimizer), state_of(optimizer, parameters)))
    for pending, expected in saved:
        assert restored(tmp_path, pending.wait()) == expected


def test_a_step_need_not_wait_for_a_save_that_has_not_written_a_byte(tmp_path, gate):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    parameters, optimizer = start(tmp_path / "nvme", "host")  # three records: one is being written, two are copied
    with optimizer:
        train(optimizer, parameters, 0, HALF)
        expected = state_of(optimizer, parameters)
        pending = checkpoints.save(HALF, optimizer=optimizer)
        train(optimizer, parameters, HALF, HALF + 3)
        assert not pending.done()
        assert checkpoints.list() == ()
        gate.opened.set()
        assert restored(tmp_path, pending.wait()) == expected
        assert pending.done()


def test_a_save_that_fails_raises_in_wait_and_leaves_older_checkpoints_and_training_alone(tmp_path, gate):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    parameters, optimizer = start(tmp_path / "nvme", "host, many records")
    with optimizer:
        train(optimizer, parameters, 0, HALF)
        gate.opened.set()
        older = checkpoints.save(HALF, optimizer=optimizer).wait()
        gate.broken = True
        pending = checkpoints.save(HALF + 1, optimizer=optimizer)
        train(optimizer, parameters, HALF, HALF + 2)
        for _ in range(2):
            with pytest.raises(tierstep.DiskFull, match="says the gate"):
                pending.wait()
        gate.broken = False
        checkpoints.save(HALF + 2, optimizer=optimizer, wait=True)
        assert [info.step for info in checkpoints.list()] == [HALF, HALF + 2]
        tierstep.verify_checkpoint(older)


def test_an_error_that_nobody_waited_for_is_raised_by_the_next_save_and_only_once(tmp_path, gate):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    parameters, optimizer = start(tmp_path / "nvme", "host")
    with optimizer:
        train(optimizer, parameters, 0, 1)
        gate.opened.set()
        gate.broken = True
        checkpoints.save(1, optimizer=optimizer).join()
        gate.broken = False
        with pytest.raises(tierstep.DiskFull, match="says the gate"):
            checkpoints.save(2, optimizer=optimizer)
        checkpoints.save(3, optimizer=optimizer, wait=True)
    assert [info.step for info in checkpoints.list()] == [3]


def test_a_second_save_waits_for_the_first(tmp_path, waited_for):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    parameters, optimizer = start(tmp_path / "nvme", "host")
    with optimizer:
        train(optimizer, parameters, 0, 1)
        first = checkpoints.save(1, optimizer=optimizer)
        second = checkpoints.save(2, optimizer=optimizer)
        assert waited_for == [first]
        assert first.done()
        second.wait()
    assert [info.step for info in checkpoints.list()] == [1, 2]


def test_weights_and_extras_are_those_of_the_call(tmp_path, gate):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    model, seen = torch.nn.Linear(3, 3), torch.zeros(4)
    expected = model.weight.detach().clone()
    pending = checkpoints.save(1, model=model, extra={"seen": seen})
    model.weight.data.zero_()
    seen.fill_(9)
    gate.opened.set()
    pending.wait()
    extra = checkpoints.restore(model=model)
    assert torch.equal(model.weight, expected)
    assert not extra["seen"].any()


def test_closing_the_optimizer_does_not_cut_a_save_short(tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    parameters, optimizer = start(tmp_path / "nvme", "mixed")
    with optimizer:
        train(optimizer, parameters, 0, HALF)
        expected = state_of(optimizer, parameters)
        pending = checkpoints.save(HALF, optimizer=optimizer)
    assert restored(tmp_path, pending.wait()) == expected


def test_a_process_that_ends_without_waiting_completes_its_save(tmp_path):
    code = (
        "import sys; from training_runs import *; import tierstep\n"
        "parameters = make_parameters()\n"
        "optimizer = tierstep.AdamW(parameters.items(), tiers=tierstep.Tiers(gpu=0, ram=1 << 20))\n"
        "set_gradients(parameters, 0); optimizer.step()\n"
        "tierstep.Checkpoints(sys.argv[1]).save(1, optimizer=optimizer)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "checkpoints"], cwd=Path(__file__).parent.parent, check=True)
    (info,) = tierstep.Checkpoints(tmp_path / "checkpoints").list()
    tierstep.verify_checkpoint(info.path)


def test_restoring_waits_for_the_save_under_way(tmp_path, waited_for):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    parameters, optimizer = start(tmp_path / "nvme", "host")
    with optimizer:
        train(optimizer, parameters, 0, 1)
        expected = state_of(optimizer, parameters)
        pending = checkpoints.save(1, optimizer=optimizer, extra={"step": 1})
        set_gradients(parameters, 1)
        optimizer.step()
        assert waited_for == []
        assert checkpoints.restore(optimizer=optimizer) == {"step": 1}
        assert waited_for == [pending]
        assert state_of(optimizer, parameters) == expected
