"""A checkpoint of what lies on the drive moves no data, and neither training nor restoring ever changes it."""

import shutil
import tempfile

import pytest

import tierstep
from tierstep import Tiers

from training_runs import OPTIONS, make_parameters, outcome, run, set_gradients, train

HALF, END = 5, 30


@pytest.fixture(scope="module")
def expected():
    return run(Tiers(gpu=0, ram=1 << 20), steps=END)


def cold(path, **options):
    path.mkdir(exist_ok=True)
    return Tiers(**{"gpu": 0, "ram": 8 << 10, "nvme": [path], "subgroup": 1000, **options})


def start(tiers, seed=0):
    parameters = make_parameters(seed)
    return parameters, tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers)


def records(checkpoint):
    return {file.name: file.stat() for file in (checkpoint / "records").iterdir()}


def contents(checkpoint):
    return {file.name: file.read_bytes() for file in (checkpoint / "records").iterdir()}


@pytest.fixture
def checkpoints(tmp_path):
    return tierstep.Checkpoints(tmp_path / "checkpoints", keep=None)


def test_cold_records_are_linked_and_only_what_is_in_memory_is_written(tmp_path, checkpoints):
    parameters, optimizer = start(cold(tmp_path / "nvme"))
    with optimizer:
        train(optimizer, parameters, 0, HALF)
        in_slots = len(optimizer.training_state.store.resident())
        saved = records(checkpoints.save(HALF, optimizer=optimizer).wait())
        assert in_slots == 2
        assert sorted(stat.st_nlink for stat in saved.values()) == [1] * in_slots + [2] * (len(saved) - in_slots)


def test_training_on_leaves_every_checkpoint_as_it_was(tmp_path, checkpoints, expected):
    parameters, optimizer = start(cold(tmp_path / "nvme"))
    before = {}
    with optimizer:
        for step in range(0, END, HALF):
            train(optimizer, parameters, step, step + HALF)
            path = checkpoints.save(step + HALF, optimizer=optimizer).wait()
            before[path] = contents(path)
        assert outcome(optimizer, parameters) == expected
    for path, bytes_saved in before.items():
        assert contents(path) == bytes_saved
        tierstep.verify_checkpoint(path)


def test_restoring_takes_the_files_back_without_a_copy(tmp_path, checkpoints, expected):
    parameters, optimizer = start(cold(tmp_path / "nvme"))
    with optimizer:
        train(optimizer, parameters, 0, HALF)
        path = checkpoints.save(HALF, optimizer=optimizer).wait()
        weights = {name: p.detach().clone() for name, p in parameters.items()}
    saved = contents(path)
    parameters, optimizer = start(cold(tmp_path / "nvme"), seed=1)
    with optimizer:
        written = optimizer.moved_bytes()["write"]
        checkpoints.restore(optimizer=optimizer)
        assert optimizer.moved_bytes()["write"] == written
        assert {stat.st_nlink for stat in records(path).values()} == {2}
        for name, parameter in parameters.items():
            parameter.data.copy_(weights[name])
        train(optimizer, parameters, HALF, END)
        assert outcome(optimizer, parameters) == expected
    assert contents(path) == saved
    assert {stat.st_nlink for stat in records(path).values()} == {1}


def test_one_checkpoint_serves_two_optimizers_at_once(tmp_path, checkpoints):
    parameters, optimizer = start(cold(tmp_path / "nvme"))
    with optimizer:
        train(optimizer, parameters, 0, HALF)
        path = checkpoints.save(HALF, optimizer=optimizer).wait()
    outcomes = []
    first, second = start(cold(tmp_path / "nvme")), start(cold(tmp_path / "nvme"))
    for _, restored in (first, second):
        checkpoints.restore(optimizer=restored, path=path)
    for parameters, restored in (first, second):
        train(restored, parameters, HALF, HALF + 3)
        outcomes.append(outcome(restored, parameters))
        restored.close()
    assert outcomes[0] == outcomes[1]
    tierstep.verify_checkpoint(path)


def test_deleting_a_checkpoint_leaves_the_optimizer_its_state(tmp_path, checkpoints, expected):
    parameters, optimizer = start(cold(tmp_path / "nvme"))
    with optimizer:
        train(optimizer, parameters, 0, HALF)
        checkpoints.keep = 1
        for _ in range(3):
            checkpoints.save(HALF, optimizer=optimizer, wait=True)
        shutil.rmtree(checkpoints.directory)
        train(optimizer, parameters, HALF, END)
        assert outcome(optimizer, parameters) == expected


def test_another_file_system_gets_a_copy(tmp_path, expected):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        checkpoints = tierstep.Checkpoints(elsewhere)
        parameters, optimizer = start(cold(tmp_path / "nvme"))
        with optimizer:
            train(optimizer, parameters, 0, HALF)
            path = checkpoints.save(HALF, optimizer=optimizer).wait()
            assert {stat.st_nlink for stat in records(path).values()} == {1}
        _, optimizer = start(cold(tmp_path / "nvme"), seed=1)
        with optimizer:
            checkpoints.restore(optimizer=optimizer)


def test_no_file_is_left_when_checkpoints_and_optimizer_are_gone(tmp_path, checkpoints):
    parameters, optimizer = start(cold(tmp_path / "nvme"))
    with optimizer:
        for step in range(4):
            train(optimizer, parameters, step, step + 1)
            checkpoints.save(step, optimizer=optimizer)
    assert list((tmp_path / "nvme").iterdir()) == []


def test_a_bit_flipped_in_a_slot_file_is_noticed_when_it_is_read(tmp_path):
    parameters, optimizer = start(cold(tmp_path / "nvme"))
    with optimizer:
        train(optimizer, parameters, 0, HALF)
        files = sorted((tmp_path / "nvme").glob("*/record-*.slot"))
        resident = optimizer.training_state.store.resident()
        victim = next(f for f in files if int(f.name[7:13]) not in resident)
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        set_gradients(parameters, HALF)
        with pytest.raises(
            tierstep.TransferError, match=rf"the state of .*\(record {int(victim.name[7:13])}\) was read .* damaged"
        ):
            optimizer.step()
