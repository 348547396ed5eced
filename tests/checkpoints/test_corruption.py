"""C3: whatever is wrong with a checkpoint's bytes or files is refused by name, before anything is changed."""

import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierstep
from tierstep import Tiers

from checkpoints.hostile import start
from training_runs import SHAPES, outcome, set_gradients, train

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = {"records": "records/*.bin", "weights": "model.safetensors", "extras": "tensors.safetensors",
         "manifest": "manifest.json"}  # fmt: skip
EXTRA = {"seen": torch.arange(3000), "flags": torch.ones(2, 3, dtype=torch.int8)}


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    """Two checkpoints of one run, with every record, weight and extra different."""
    root = tmp_path_factory.mktemp("saved")
    (root / "nvme").mkdir()
    checkpoints, saved = tierstep.Checkpoints(root / "checkpoints"), []
    parameters, model, optimizer = start(Tiers(gpu=2500, ram=9_500, nvme=[root / "nvme"], subgroup=1000, slots=2))
    with optimizer:
        for step in (2, 4):
            train(optimizer, parameters, step - 2, step)
            extra = {name: value + step for name, value in EXTRA.items()}
            saved.append(checkpoints.save(step, model=model, optimizer=optimizer, extra=extra).wait())
    return saved


@pytest.fixture
def copy(two_checkpoints, tmp_path):
    return shutil.copytree(two_checkpoints[1], tmp_path / "copy")


@pytest.fixture(scope="module")
def target():
    """What every checkpoint here is restored into, with a state of its own."""
    parameters, model, optimizer = start(Tiers(gpu=0, ram=1 << 20), seed=1)
    set_gradients(parameters, 1)
    optimizer.step()
    return parameters, model, optimizer


@pytest.fixture
def refused(target, tmp_path):
    """Restore from a folder, and see that it is refused and nothing has changed; return the error's words."""
    parameters, model, optimizer = target
    before, random_state = outcome(optimizer, parameters), torch.get_rng_state()

    def refused(folder, *, kind=tierstep.CheckpointError):
        with pytest.raises(kind) as caught:
            tierstep.Checkpoints(tmp_path / "none").restore(model=model, optimizer=optimizer, path=folder)
        assert outcome(optimizer, parameters) == before
        assert torch.equal(torch.get_rng_state(), random_state)
        with pytest.raises(kind):
            tierstep.verify_checkpoint(folder)
        return str(caught.value)

    return refused


def flip_a_bit(path, other):
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 4
    path.write_bytes(data)


def zero_a_page(path, other):
    data = bytearray(path.read_bytes())
    start = (len(data) - 1) // 4096 * 4096 if path.suffix == ".safetensors" else 0
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    path.write_bytes(data)


def cut_off_the_end(path, other):
    os.truncate(path, path.stat().st_size - 1)


def empty(path, other):
    os.truncate(path, 0)


def remove(path, other):
    path.unlink()


def take_from_another_checkpoint(path, other):
    path.write_bytes(other.read_bytes())


def replace_by_a_directory(path, other):
    path.unlink()
    path.mkdir()


def replace_by_a_pipe(path, other):
    path.unlink()
    os.mkfifo(path)


def replace_by_a_link(path, other):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def replace_by_an_endless_device(path, other):
    path.unlink()
    path.symlink_to("/dev/zero")


def grow_without_end(path, other):
    os.truncate(path, 1 << 42)


DAMAGES = [flip_a_bit, zero_a_page, cut_off_the_end, empty, remove, take_from_another_checkpoint,
           replace_by_a_directory, replace_by_a_pipe, replace_by_a_link, replace_by_an_endless_device,
           grow_without_end]  # fmt: skip
CASES = [
    pytest.param(kind, damage, id=f"{kind}-{damage.__name__}")
    for kind in KINDS
    for damage in DAMAGES
    if (kind, damage) != ("manifest", take_from_another_checkpoint)  # that fits to itself; see the test after
]
NAMES = {
    "records": [name for name in SHAPES],
    "weights": [name.replace(".", "_") for name in SHAPES],
    "extras": [f"extra.{name}" for name in EXTRA] + ["rng."],
    "manifest": ["manifest.json"],
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("kind", "damage"), CASES)
def test_damage_is_refused_and_names_the_tensor(copy, two_checkpoints, refused, kind, damage):
    path = sorted(copy.glob(KINDS[kind]))[0]
    damage(path, two_checkpoints[0] / path.relative_to(copy))
    words = refused(copy)
    assert str(path.relative_to(copy)) in words
    assert any(name in words for name in NAMES[kind])


def test_a_manifest_of_another_checkpoint_is_refused(copy, two_checkpoints, refused):
    shutil.copy(two_checkpoints[0] / "manifest.json", copy)
    assert "is damaged" in refused(copy)


def test_swapped_files_are_refused(copy, refused):
    sizes = {}
    for path in sorted((copy / "records").iterdir()):
        sizes.setdefault(path.stat().st_size, []).append(path)
    first, second = next(paths for paths in sizes.values() if len(paths) > 1)[:2]
    first.rename(copy / "x"), second.rename(first), (copy / "x").rename(second)
    assert first.name in refused(copy)


def test_weights_and_extras_swapped_are_refused(copy, refused):
    first, second = copy / "model.safetensors", copy / "tensors.safetensors"
    first.rename(copy / "x"), second.rename(first), (copy / "x").rename(second)
    assert "should hold" in refused(copy)


@pytest.mark.parametrize("shape", ["[3, 2]", "[6]   ", "[1, 6]"])
def test_another_shape_of_the_same_bytes_is_refused(copy, refused, shape):
    """Everything fits, the checksum of the tensor too: only its meaning is another."""
    path = copy / "tensors.safetensors"
    data = path.read_bytes()
    assert b"[2, 3]" in data
    path.write_bytes(data.replace(b"[2, 3]", shape.encode()))
    assert "tensors.safetensors" in refused(copy)


def test_another_dtype_of_the_same_bytes_is_refused(copy, refused):
    path = copy / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"F16"', b'"I16"'))
    assert "model.safetensors" in refused(copy)


@QUICK
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_any_flipped_bit_anywhere_is_refused(two_checkpoints, kind, data):
    folder = two_checkpoints[1]
    path = sorted(folder.glob(KINDS[kind]))[-1]
    sound = path.read_bytes()
    position, bit = data.draw(st.integers(0, len(sound) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(sound)
    damaged[position] ^= 1 << bit
    if kind == "manifest" and bytes(damaged).split() == sound.split():
        return  # one kind of white space for another
    path.write_bytes(damaged)  # a record may be linked from nowhere else: the optimizer is closed
    try:
        with pytest.raises(tierstep.CheckpointError, match=path.name):
            tierstep.verify_checkpoint(folder)
    finally:
        path.write_bytes(sound)


def test_a_folder_of_records_that_is_a_link_is_refused(copy, refused):
    (copy / "records").rename(copy / "elsewhere")
    (copy / "records").symlink_to(copy / "elsewhere")
    assert "symbolic link" in refused(copy)
