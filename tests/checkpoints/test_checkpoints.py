"""C1, C3, C5: exact resume from every tier, and refusal of every wrong byte."""

import json
import os
import random
import shutil
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

import tierstep
from tierstep import Tiers

from training_runs import OPTIONS, make_parameters, outcome, run, set_gradients, train

HALF, END = 5, 9


@pytest.fixture(scope="module")
def expected():
    return run(Tiers(gpu=0, ram=1 << 20), steps=END)


def layouts(path):
    path.mkdir(exist_ok=True)
    return {
        "device": Tiers(gpu=1 << 20, ram=0),
        "host": Tiers(gpu=0, ram=1 << 20),
        "nvme": Tiers(gpu=0, ram=8 << 10, nvme=[path], subgroup=2000),
        "mixed": Tiers(gpu=2500, ram=9_500, nvme=[path], subgroup=1000, slots=2),
        "tiny": Tiers(gpu=0, ram=1 << 20, subgroup=70),
    }


class Model(torch.nn.Module):
    """The test parameters as a module, with a buffer and a tied weight."""

    def __init__(self, seed=0):
        super().__init__()
        named = OrderedDict((name.replace(".", "_"), p) for name, p in make_parameters(seed).items())
        self.weights = torch.nn.ParameterDict(named)  # a plain dict would be sorted
        self.tied = self.weights["embed_weight"]
        self.register_buffer("seen", torch.tensor([seed]))

    def parameters_by_name(self):
        return {name.replace("_", "."): p for name, p in self.weights.items()}


def start(tiers, seed=0):
    model = Model(seed)
    return model, tierstep.AdamW(model.parameters_by_name().items(), **OPTIONS, tiers=tiers)


@pytest.mark.parametrize("saved_from", ["device", "host", "nvme", "mixed", "tiny"])
@pytest.mark.parametrize("restored_to", ["device", "host", "nvme", "mixed", "tiny"])
def test_resume_is_exact_from_every_tier_to_every_other(tmp_path, expected, saved_from, restored_to):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    model, optimizer = start(layouts(tmp_path / "a")[saved_from])
    with optimizer:
        train(optimizer, model.parameters_by_name(), 0, HALF)
        checkpoints.save(HALF, model=model, optimizer=optimizer, extra={"done": HALF}).wait()
        train(optimizer, model.parameters_by_name(), HALF, HALF + 2)  # must not matter
    model, optimizer = start(layouts(tmp_path / "b")[restored_to], seed=1)
    with optimizer:
        assert checkpoints.restore(model=model, optimizer=optimizer) == {"done": HALF}
        train(optimizer, model.parameters_by_name(), HALF, END)
        assert outcome(optimizer, model.parameters_by_name()) == expected


@pytest.mark.parametrize("layout", ["host", "nvme"])
def test_resume_before_the_first_step(tmp_path, expected, layout):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    model, optimizer = start(layouts(tmp_path / "a")[layout])
    with optimizer:
        checkpoints.save(0, model=model, optimizer=optimizer)
    model, optimizer = start(layouts(tmp_path / "a")[layout], seed=1)
    with optimizer:
        train(optimizer, model.parameters_by_name(), 20, 22)  # a state that the restore has to wipe out
        checkpoints.restore(model=model, optimizer=optimizer)
        train(optimizer, model.parameters_by_name(), 0, END)
        assert outcome(optimizer, model.parameters_by_name()) == expected


def test_hyperparameters_and_the_tied_weight_come_back(tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path)
    model, optimizer = start(Tiers(gpu=0, ram=1 << 20))
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.param_groups[0]["betas"] = (0.5, 0.75)
    checkpoints.save(0, model=model, optimizer=optimizer)
    other, restored = start(Tiers(gpu=0, ram=1 << 20), seed=1)
    checkpoints.restore(model=other, optimizer=restored)
    assert restored.param_groups[0]["lr"] == 0.125
    assert restored.param_groups[0]["betas"] == (0.5, 0.75)
    assert torch.equal(other.tied, model.tied)
    assert other.seen.item() == 0


def test_extras_come_back_with_their_types(tmp_path):
    extra = {
        "text": "ä", "tuple": (1, (2.5, None)), "nan": float("inf"), "keys": {1: "a", (2, 3): [True]},
        "counter": Counter({3: 2}), "tensor": torch.arange(6).view(2, 3), "nested": [{"t": torch.ones(1)}],
        "numpy": np.float64(0.1), "__odd__": {"__tensor__": "x"}, "empty": [{}, (), []],
    }  # fmt: skip
    checkpoints = tierstep.Checkpoints(tmp_path)
    checkpoints.save(3, extra=extra)
    found = checkpoints.restore()
    assert torch.equal(found.pop("tensor"), extra.pop("tensor"))
    assert torch.equal(found.pop("nested")[0]["t"], extra.pop("nested")[0]["t"])
    assert found == extra
    assert isinstance(found["counter"], Counter)


def test_an_extra_that_cannot_be_saved_is_named_before_anything_is_written(tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path)
    with pytest.raises(tierstep.ConfigError, match=r"extra\.a\.1 is a object"):
        checkpoints.save(3, extra={"a": [1, object()]})
    assert checkpoints.list() == ()
    assert list(tmp_path.iterdir()) == []


def test_random_states_come_back(tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    checkpoints.save(1)
    expected = torch.rand(3), random.random(), np.random.rand()
    checkpoints.restore()
    found = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


@pytest.fixture
def saved(tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    model, optimizer = start(layouts(tmp_path / "a")["mixed"])
    with optimizer:
        train(optimizer, model.parameters_by_name(), 0, 3)
        return checkpoints, checkpoints.save(3, model=model, optimizer=optimizer).wait()


def files_of(folder):
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def zero_page(path):
    data = bytearray(path.read_bytes())
    start = len(data) // 2 // 4096 * 4096
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def extend(path):
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGES = {"flipped bit": flip, "zeroed page": zero_page, "truncated": truncate, "extended": extend,
           "deleted": lambda path: path.unlink()}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_kind_of_damage_to_every_file_is_refused_before_anything_changes(saved, damage, tmp_path):
    checkpoints, folder = saved
    model, optimizer = start(Tiers(gpu=0, ram=1 << 20), seed=1)
    set_gradients(model.parameters_by_name(), 1)
    optimizer.step()
    before = outcome(optimizer, model.parameters_by_name())
    for name in files_of(folder):
        copy = tmp_path / "damaged"
        shutil.copytree(folder, copy)
        DAMAGES[damage](copy / name)
        with pytest.raises(tierstep.CheckpointError) as caught:
            checkpoints.restore(model=model, optimizer=optimizer, path=copy)
        assert name in str(caught.value)
        if name.startswith("records/"):
            assert any(parameter in str(caught.value) for parameter in model.parameters_by_name())
        with pytest.raises(tierstep.CheckpointError):
            tierstep.verify_checkpoint(copy)
        shutil.rmtree(copy)
    assert outcome(optimizer, model.parameters_by_name()) == before
    checkpoints.restore(model=model, optimizer=optimizer)


def test_a_damaged_weight_is_named(saved):
    _, folder = saved
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(tierstep.CheckpointCorrupt, match=r"tensor [\w.]+ in .*model\.safetensors is damaged"):
        tierstep.verify_checkpoint(folder)


def test_swapped_record_files_are_refused(saved):
    _, folder = saved
    records = sorted((folder / "records").iterdir())
    same = [r for r in records if r.stat().st_size == records[0].stat().st_size]
    same[0].rename(folder / "x"), same[1].rename(same[0]), (folder / "x").rename(same[1])
    with pytest.raises(tierstep.CheckpointCorrupt, match="records/"):
        tierstep.verify_checkpoint(folder)


@pytest.mark.parametrize(
    "hostile",
    [
        {"version": 99},
        {"format": "pickle"},
        {"version": 99, "optimizer": None},
    ],
)
def test_another_format_is_refused_as_such(saved, hostile):
    _, folder = saved
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | hostile))
    with pytest.raises(tierstep.CheckpointMismatch, match="this version reads"):
        tierstep.verify_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 3}', "[" * 100_000, "\x00"])
def test_a_manifest_that_is_none_is_refused(saved, text):
    _, folder = saved
    (folder / "manifest.json").write_text(text)
    with pytest.raises(tierstep.CheckpointError):
        tierstep.verify_checkpoint(folder)


def rewrite_manifest(folder, edit):
    """Change a manifest and give it a checksum that fits, as an attacker would."""
    from tierstep.engine.manifest import _checksum

    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("checksum")
    edit(manifest)
    manifest["checksum"] = _checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


HOSTILE = {
    "path out of the folder": lambda m: m["optimizer"]["records"][0].update(file="../../secret"),
    "absolute path": lambda m: m["model"].update(file="/etc/passwd"),
    "negative size": lambda m: m["optimizer"]["records"][0].update(nbytes=-1),
    "absurd size": lambda m: m["optimizer"]["records"][0].update(numel=1 << 70),
    "record too small for its elements": lambda m: m["optimizer"]["records"][0].update(numel=1 << 40),
    "wrong type": lambda m: m.update(step="3"),
    "slice of no parameter": lambda m: m["optimizer"]["records"][0]["slices"][0].update(parameter=999),
    "slice beyond its record": lambda m: m["optimizer"]["records"][0]["slices"][0].update(offset=1 << 40),
    "slice turned round": lambda m: m["optimizer"]["records"][0]["slices"][0].update(stop=0),
    "unknown dtype": lambda m: m["optimizer"]["records"][0].update(dtype="object"),
    "unknown key": lambda m: m.update(hello=1),
    "missing slices": lambda m: m["optimizer"]["records"].pop(),
    "slices that overlap": lambda m: m["optimizer"]["records"].append(m["optimizer"]["records"][0]),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_refused_before_anything_changes(saved, kind):
    checkpoints, folder = saved
    rewrite_manifest(folder, HOSTILE[kind])
    model, optimizer = start(Tiers(gpu=0, ram=1 << 20), seed=1)
    before = outcome(optimizer, model.parameters_by_name())
    with pytest.raises(tierstep.CheckpointError):
        checkpoints.restore(model=model, optimizer=optimizer, path=folder)
    assert outcome(optimizer, model.parameters_by_name()) == before


def test_a_record_that_is_a_symbolic_link_is_refused(saved, tmp_path):
    _, folder = saved
    record = sorted((folder / "records").iterdir())[0]
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(tierstep.CheckpointCorrupt, match="symbolic link"):
        tierstep.verify_checkpoint(folder)


def test_a_checkpoint_of_another_model_is_refused_by_name(saved):
    checkpoints, _ = saved
    other = torch.nn.Linear(3, 3)
    with pytest.raises(tierstep.CheckpointMismatch, match="another model"):
        checkpoints.restore(model=other)
    optimizer = tierstep.AdamW(other.named_parameters(), tiers=Tiers(gpu=0, ram=1 << 20))
    with pytest.raises(tierstep.CheckpointMismatch, match="another model"):
        checkpoints.restore(optimizer=optimizer)


def test_parameters_of_another_shape_are_refused(saved):
    checkpoints, _ = saved
    parameters = make_parameters()
    parameters["norm.weight"] = torch.nn.Parameter(torch.zeros(17, dtype=torch.bfloat16))
    optimizer = tierstep.AdamW(parameters.items(), tiers=Tiers(gpu=0, ram=1 << 20))
    with pytest.raises(tierstep.CheckpointMismatch, match=r"norm\.weight is torch\.bfloat16 \[17\]"):
        checkpoints.restore(optimizer=optimizer)


def test_an_empty_or_missing_directory_has_no_checkpoint(tmp_path):
    assert tierstep.Checkpoints(tmp_path).restore() is None
    assert tierstep.Checkpoints(tmp_path / "absent").restore() is None


def test_the_oldest_are_pruned_and_the_newest_save_wins_whatever_its_step(tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 1, 1):
        checkpoints.save(step, extra={"step": step}, wait=True)
    assert [info.path.name for info in checkpoints.list()] == ["step-00000001", "step-00000001.2"]
    checkpoints.save(7, extra={"step": 7}, wait=True)
    assert checkpoints.restore() == {"step": 7}


def test_foreign_files_and_half_written_checkpoints_are_left_or_removed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000009" / "mine.txt").write_text("mine")
    (tmp_path / ".saving-00000004-abc").mkdir()
    (tmp_path / ".saving-00000004-abc" / "part").write_text("half")
    checkpoints = tierstep.Checkpoints(tmp_path)
    checkpoints.save(1, wait=True)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        ".tierstep-lock", "notes.txt", "step-00000001", "step-00000009",
    ]  # fmt: skip


def test_two_savers_in_one_directory_are_refused(tmp_path):
    from tierstep.engine.directory_lock import DirectoryLock

    with DirectoryLock(tmp_path), pytest.raises(tierstep.CheckpointError, match="in use by another run or save"):
        tierstep.Checkpoints(tmp_path).save(1)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("encoder.weight", "extra"), r"only here: encoder\.weight \(the other side has encoder\.weigth\), extra; "
                                      r"only there: encoder\.weigth \(the other side has encoder\.weight\)\)"),
        ((), r"only here: none; only there: encoder\.weigth\)"),
    ],
    ids=["renamed and extra", "missing"],
)  # fmt: skip
def test_a_renamed_missing_or_extra_parameter_is_refused_with_the_nearest_names(tmp_path, names, words):
    def optimizer_of(*names):
        named = [(name, torch.nn.Parameter(torch.ones(3))) for name in ("kept", *names)]
        return tierstep.AdamW(named, tiers=Tiers(gpu=0, ram=1 << 20))

    checkpoints = tierstep.Checkpoints(tmp_path)
    with optimizer_of("encoder.weigth") as optimizer:
        checkpoints.save(0, optimizer=optimizer).wait()
    with optimizer_of(*names) as optimizer, pytest.raises(tierstep.CheckpointMismatch, match=words):
        checkpoints.restore(optimizer=optimizer)


def test_verify_names_a_damaged_tensor_of_the_extras(tmp_path):
    folder = tierstep.Checkpoints(tmp_path).save(0, extra={"seen": torch.arange(9)}).wait()
    path = folder / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[data.rindex(b"\x08")] ^= 1  # the last element of seen
    path.write_bytes(data)
    with pytest.raises(tierstep.CheckpointCorrupt, match=r"tensor extra\.seen in .* is damaged"):
        tierstep.verify_checkpoint(folder)
