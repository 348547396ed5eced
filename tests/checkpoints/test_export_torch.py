"""C5: a checkpoint as a file of torch's own AdamW."""

import errno
import subprocess
import sys
import zipfile

import pytest
import torch

import tierstep
from tierstep.engine.interchange import torch_export, torch_file

from checkpoints.saved_models import Model, fp32_masters, saved, start, train


@pytest.fixture
def checkpoint(tmp_path):
    model, optimizer, folder = saved(tmp_path)
    with optimizer:
        yield model, optimizer, folder


def same_bits(found, expected):
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


def test_the_state_is_that_of_the_optimizer_and_torch_takes_it(checkpoint, tmp_path):
    model, optimizer, folder = checkpoint
    tierstep.export_checkpoint(folder, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = optimizer.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for number, entry in expected["state"].items():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert same_bits(found["state"][number][name], entry[name])
    other = Model(1, torch.float32)
    other.load_state_dict(found["fp32_weights"], strict=False)
    torch_optimizer = torch.optim.AdamW(other.groups())
    torch_optimizer.load_state_dict(found)
    assert torch_optimizer.param_groups[0]["lr"] == 0.01
    assert torch_optimizer.param_groups[1]["weight_decay"] == 0.5
    assert torch_optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    assert same_bits(torch_optimizer.state[other.embed]["exp_avg"], optimizer.state[model.embed]["exp_avg"])
    train(other, torch_optimizer, 3, 5)


def test_groups_have_the_keys_that_torch_writes(checkpoint, tmp_path):
    tierstep.export_checkpoint(checkpoint[2], tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = torch.optim.AdamW(Model().groups()).state_dict()
    assert [group.keys() for group in found["param_groups"]] == [group.keys() for group in expected["param_groups"]]
    assert [group["params"] for group in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert found["param_groups"][0]["param_names"] == ["embed", "norm", "fp16", "frozen"]


def test_the_fp32_weights_are_the_exact_masters(checkpoint, tmp_path):
    model, optimizer, folder = checkpoint
    tierstep.export_checkpoint(folder, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)["fp32_weights"]
    expected = fp32_masters(model, optimizer)
    assert found.keys() == expected.keys() - {"frozen"}
    for name, value in found.items():
        assert same_bits(value, expected[name])
    assert not torch.equal(found["embed"], found["embed"].bfloat16().float())


def test_the_file_is_a_sound_archive_whose_tensors_can_be_mapped(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_file, "ZIP64_FROM_BYTES", 100)
    monkeypatch.setattr("tierstep.engine.interchange.source.PIECE_ELEMENTS", 7)
    tierstep.export_checkpoint(checkpoint[2], tmp_path / "out.pt")
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None
    mapped = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    plain = torch.load(tmp_path / "out.pt", weights_only=True)
    for number, entry in plain["state"].items():
        for name, value in entry.items():
            assert same_bits(mapped["state"][number][name], value)
            assert mapped["state"][number][name].data_ptr() % 64 == 0


def test_a_checkpoint_of_the_optimizer_alone_has_the_weights_that_it_can_have(tmp_path):
    _, optimizer = start()
    with optimizer:
        folder = tierstep.Checkpoints(tmp_path / "c").save(0, optimizer=optimizer).wait()
    done = tierstep.export_checkpoint(folder, tmp_path / "out.pt")
    assert set(done.without_weights) == {"embed", "norm", "fp16", "head", "bias", "scalar", "unused"}
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (found["fp32_weights"], found["state"]) == ({}, {})


def test_a_checkpoint_without_an_optimizer_is_refused(tmp_path):
    folder = tierstep.Checkpoints(tmp_path / "c").save(0, model=Model()).wait()
    with pytest.raises(tierstep.CheckpointMismatch, match="holds no optimizer"):
        tierstep.export_checkpoint(folder, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_damage_is_refused_by_name_and_nothing_is_left(checkpoint, tmp_path):
    path = checkpoint[2] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(tierstep.CheckpointCorrupt, match=r"tensor \w+ in .*model.safetensors is damaged"):
        tierstep.export_checkpoint(checkpoint[2], tmp_path / "out.pt")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_a_target_that_exists_is_refused_and_kept(checkpoint, tmp_path, kind):
    target = tmp_path / "out.pt"
    {"file": target.touch, "folder": target.mkdir, "dangling link": lambda: target.symlink_to("nowhere")}[kind]()
    with pytest.raises(tierstep.ConfigError, match=r"out\.pt exists already"):
        tierstep.export_checkpoint(checkpoint[2], target)
    assert target.lstat()


def test_a_target_that_appears_meanwhile_is_kept(checkpoint, tmp_path):
    target = tmp_path / "out.pt"

    def appear(done, total):
        if list(tmp_path.glob(".out*")):
            target.write_text("mine")

    with pytest.raises(tierstep.TransferError, match="File exists"):
        tierstep.export_checkpoint(checkpoint[2], target, on_progress=appear)
    assert target.read_text() == "mine"
    assert not list(tmp_path.glob(".out*"))


def test_an_unknown_format_and_a_missing_folder_are_refused(checkpoint, tmp_path):
    with pytest.raises(tierstep.ConfigError, match="torch"):
        tierstep.export_checkpoint(checkpoint[2], tmp_path / "out", to="onnx")
    with pytest.raises(tierstep.ConfigError, match="no directory"):
        tierstep.export_checkpoint(checkpoint[2], tmp_path / "absent/out.pt")


def test_a_drive_without_room_is_refused_with_numbers(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("tierstep.io.drafts.free_bytes", lambda directory: 1000)
    with pytest.raises(tierstep.DiskFull, match=r"takes \d+ bytes, 1000 are free there and \d+ are missing"):
        tierstep.export_checkpoint(checkpoint[2], tmp_path / "out.pt")
    assert not list(tmp_path.glob("*out*"))


def test_a_drive_that_becomes_full_says_how_much_is_missing_and_nothing_is_left(checkpoint, tmp_path, monkeypatch):
    def full(file, value, on_write):
        file.write(bytes(1000))
        file.flush()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(torch_export, "write_torch_file", full)
    with pytest.raises(tierstep.DiskFull, match=r"was full after 1000: \d+ are missing; nothing is left"):
        tierstep.export_checkpoint(checkpoint[2], tmp_path / "out.pt")
    assert not list(tmp_path.glob("*out*"))


def test_progress_counts_what_is_verified_and_what_is_written(checkpoint, tmp_path):
    seen = []
    tierstep.export_checkpoint(checkpoint[2], tmp_path / "out.pt", on_progress=lambda *numbers: seen.append(numbers))
    done, total = seen[-1]
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert (tmp_path / "out.pt").stat().st_size < total
    assert 0.9 < done / total <= 1


def test_a_parameter_that_was_unfrozen_late_keeps_its_place(tmp_path):
    model, optimizer = start()
    with optimizer:
        train(model, optimizer, 0, 1)
        model.frozen.requires_grad_(True)
        train(model, optimizer, 1, 2)
        folder = tierstep.Checkpoints(tmp_path / "c").save(2, model=model, optimizer=optimizer).wait()
        tierstep.export_checkpoint(folder, tmp_path / "out.pt")
        found = torch.load(tmp_path / "out.pt", weights_only=True)
        assert found["param_groups"][0]["param_names"][3] == "frozen"
        assert same_bits(found["state"][3]["exp_avg"], optimizer.state[model.frozen]["exp_avg"])


RUN = """
import resource, sys, tierstep
small, folder, target, to = sys.argv[1:]
tierstep.export_checkpoint(small, target + ".small", to=to)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tierstep.export_checkpoint(folder, target, to=to)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_an_export_takes_memory_for_a_few_pieces_only(tmp_path, to):
    weight = torch.nn.Parameter(torch.ones(24 << 20, dtype=torch.bfloat16))
    model = torch.nn.ParameterDict({"weight": weight})
    with tierstep.AdamW(model.named_parameters(), tiers=tierstep.Tiers(gpu=0, ram="300MiB")) as optimizer:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        checkpoints = tierstep.Checkpoints(tmp_path / "c")
        folder = checkpoints.save(1, model=model, optimizer=optimizer).wait()
    _, optimizer = start()
    with optimizer:
        small = checkpoints.save(0, model=Model(), optimizer=optimizer).wait()
    arguments = [sys.executable, "-c", RUN, small, folder, tmp_path / "out", to]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 << 10  # KiB; the files have 288 MiB and more
