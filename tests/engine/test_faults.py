"""I3 and I5: a step that fails at any transfer loses nothing and can be finished with the same bits."""

import errno
from pathlib import Path

import pytest
import torch

import tierstep
from tierstep import Tiers
from tierstep.io.faults import Fail
from tierstep.io.memory import MemoryBackend

from training_runs import OPTIONS, make_parameters, outcome, run, set_gradients, train

STEPS = 4
TIERS = Tiers(gpu=0, ram=8 << 10, nvme=["/nowhere"], subgroup=1500)


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Start an optimizer whose files are in memory; the backend comes with it, for faults to order."""

    def start(*, fail_at=None):
        backend = MemoryBackend()
        if fail_at is not None:
            backend.inject(Fail(errno.EIO), at=fail_at)
        monkeypatch.setattr("tierstep.tiers.build.open_backend", lambda *_, **__: backend)
        parameters = make_parameters()
        optimizer = tierstep.AdamW(parameters.items(), **OPTIONS, tiers=cold(tmp_path))
        return optimizer, parameters, backend

    return start


@pytest.fixture(scope="module")
def expected():
    return run(Tiers(gpu=0, ram=1 << 20), steps=STEPS)


def cold(tmp_path):
    return TIERS.model_copy(update={"nvme": (tmp_path,)})


def train_with_retries(optimizer, parameters, first=0):
    """Train, calling `step` again after each failure; return the errors."""
    errors = []
    for step in range(first, STEPS):
        set_gradients(parameters, step)
        optimizer.clip_grad_norm_(10.0)
        try:
            optimizer.step()
        except tierstep.TransferError as error:
            errors.append(error)
            optimizer.step()
        optimizer.zero_grad()
    return errors


def test_a_fault_at_every_operation_and_a_retry_give_the_same_bits(start, expected):
    optimizer, parameters, backend = start()
    with optimizer:
        reserved = len(backend.log)
        train(optimizer, parameters, 0, STEPS)
        operations = len(backend.log)
    assert operations - reserved > 20
    for index in range(reserved, operations):
        optimizer, parameters, _ = start(fail_at=index)
        with optimizer:
            errors = train_with_retries(optimizer, parameters)
            assert [error.errno for error in errors] == [errno.EIO]
            assert "record-" in str(errors[0])
            assert outcome(optimizer, parameters) == expected


def test_two_faults_in_a_row_at_every_operation_and_a_retry_give_the_same_bits(start, expected):
    """The first retry fails too, at the first operation that it makes."""
    optimizer, parameters, backend = start()
    with optimizer:
        reserved = len(backend.log)
        train(optimizer, parameters, 0, STEPS)
        operations = len(backend.log)
    for index in range(reserved, operations):
        optimizer, parameters, backend = start(fail_at=index)
        with optimizer:
            errors = []
            for step in range(STEPS):
                set_gradients(parameters, step)
                optimizer.clip_grad_norm_(10.0)
                while True:
                    try:
                        optimizer.step()
                        break
                    except tierstep.TransferError as error:
                        errors.append(error.errno)
                        if len(errors) == 1:
                            backend.inject(Fail(errno.EIO), at=len(backend.log))
                optimizer.zero_grad()
            assert errors == [errno.EIO, errno.EIO]
            assert outcome(optimizer, parameters) == expected


def link_slot_files(backend):
    """Give every slot file a second name, as a checkpoint does; return these names and the bytes under them."""
    kept = {Path("/in/memory") / f"kept-{path.name}": path for path in list(backend.files)}
    assert all(backend.link(path, name) for name, path in kept.items())
    return {name: bytes(backend.files[name]) for name in kept}


def test_a_fault_at_every_operation_after_a_checkpoint_took_the_files(start, expected):
    """The next store of a linked record allocates a new file, and that can fail too."""
    optimizer, parameters, backend = start()
    with optimizer:
        train(optimizer, parameters, 0, 2)
        link_slot_files(backend)
        linked = len(backend.log)
        train(optimizer, parameters, 2, STEPS)
        operations = list(backend.log[linked:])
    assert {operation.kind for operation in operations} == {"link_count", "allocate", "remove", "read", "write"}
    for operation in operations:
        optimizer, parameters, backend = start()
        with optimizer:
            train(optimizer, parameters, 0, 2)
            kept = link_slot_files(backend)
            backend.inject(Fail(errno.EIO), at=operation.index)
            errors = train_with_retries(optimizer, parameters, 2)
            assert [error.errno for error in errors] == [errno.EIO]
            assert "record-" in str(errors[0])
            assert outcome(optimizer, parameters) == expected
        assert {name: backend.files[name] for name in kept} == kept  # also after close


def test_a_checkpoint_of_files_in_memory_holds_copies_of_them(start, tmp_path):
    """On the drive there is nothing that its records could be links to."""
    optimizer, parameters, backend = start()
    with optimizer:
        train(optimizer, parameters, 0, 2)
        path = tierstep.Checkpoints(tmp_path / "checkpoints").save(2, optimizer=optimizer).wait()
        assert "link" in {operation.kind for operation in backend.log}
        records = len(optimizer.plan.subgroups)
    assert len(list((path / "records").iterdir())) == records
    tierstep.verify_checkpoint(path)


def test_an_interrupted_step_refuses_what_would_break_it(start, tmp_path):
    optimizer, parameters, backend = start()
    with optimizer:
        train(optimizer, parameters, 0, 1)
        backend.inject(Fail(errno.EIO), at=len(backend.log))
        set_gradients(parameters, 1)
        with pytest.raises(tierstep.TransferError):
            optimizer.step()
        with pytest.raises(tierstep.StepInterrupted, match="read the state.*call step"):
            optimizer.state_dict()
        with pytest.raises(tierstep.StepInterrupted, match="save a checkpoint"):
            tierstep.Checkpoints(tmp_path / "checkpoints").save(1, optimizer=optimizer)
        kept = {name: p.grad for name, p in parameters.items()}
        set_gradients(parameters, 2)
        with pytest.raises(tierstep.StepInterrupted, match="gradients have changed"):
            optimizer.step()
        for name, parameter in parameters.items():
            parameter.grad = kept[name]
        optimizer.step()
        assert optimizer.state[parameters["norm.weight"]]["step"] == 2


def test_a_load_that_fails_half_way_refuses_steps_until_it_succeeds(start):
    optimizer, parameters, backend = start()
    with optimizer:
        train(optimizer, parameters, 0, 2)
        saved = optimizer.state_dict()
        backend.inject(Fail(errno.ENOSPC), when=lambda operation: operation.kind == "write")
        with pytest.raises(tierstep.DiskFull):
            optimizer.load_state_dict(saved)
        backend.heal()
        set_gradients(parameters, 2)
        with pytest.raises(tierstep.StepInterrupted, match="failed half-way"):
            optimizer.step()
        optimizer.load_state_dict(saved)
        optimizer.step()


def test_a_record_larger_than_every_other_and_more_records_than_slots(tmp_path):
    """I2 (DS#3062): one tensor spans several slots, and many share one."""
    parameters = {"large": torch.nn.Parameter(torch.randn(5000)), "small": torch.nn.Parameter(torch.randn(3))}
    tiers = Tiers(gpu=0, ram=3 * 8192, nvme=[tmp_path], subgroup=8000)
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers) as optimizer:
        assert optimizer.plan.pinned_bytes <= 3 * 8192
        train(optimizer, parameters, 0, 2)
