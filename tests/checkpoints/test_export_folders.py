"""C5: a checkpoint as safetensors and as a PyTorch Distributed Checkpoint."""

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tierstep
from tierstep.engine.interchange import dcp_export, source

from checkpoints.saved_models import Model, fp32_masters, saved

alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")


@pytest.fixture
def checkpoint(tmp_path):
    model, optimizer, folder = saved(tmp_path)
    with optimizer:
        yield model, optimizer, folder


@pytest.fixture(params=[7, 1 << 22], ids=["small pieces", "whole tensors"])
def _pieces(request, monkeypatch):
    monkeypatch.setattr(source, "PIECE_ELEMENTS", request.param)
    monkeypatch.setattr(dcp_export, "PIECE_ELEMENTS", request.param)


def same_bits(found, expected):
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


@pytest.mark.usefixtures("_pieces")
def test_safetensors_have_weights_and_state_bit_by_bit(checkpoint, tmp_path):
    model, optimizer, folder = checkpoint
    done = tierstep.export_checkpoint(folder, tmp_path / "out", to="safetensors")
    weights = load_file(tmp_path / "out/model.safetensors")
    expected = model.state_dict()
    assert weights.keys() == expected.keys() - {"tied"}
    assert all(same_bits(value, expected[name]) for name, value in weights.items())
    masters = fp32_masters(model, optimizer)
    state = load_file(tmp_path / "out/optimizer.safetensors")
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            assert same_bits(state[f"{name}.exp_avg"], optimizer.state[parameter]["exp_avg"])
            assert same_bits(state[f"{name}.exp_avg_sq"], optimizer.state[parameter]["exp_avg_sq"])
        if name in ("embed", "norm", "fp16"):
            assert same_bits(state[f"{name}.fp32_weight"], masters[name])
    with safe_open(tmp_path / "out/optimizer.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["steps"])["embed"] == 3
        group = json.loads(file.metadata()["param_groups"])[1]
    assert (group["weight_decay"], group["params"]) == (0.5, ["head", "bias", "scalar", "unused"])
    assert done.nbytes == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())


def test_transformers_loads_an_exported_model(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, tie_word_embeddings=True)  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    folder = tierstep.Checkpoints(tmp_path / "c").save(0, model=model).wait()
    tierstep.export_checkpoint(folder, tmp_path / "out", to="safetensors")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    config.save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert all(same_bits(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


def test_safetensors_of_a_checkpoint_without_a_model_are_refused(checkpoint, tmp_path):
    folder = tierstep.Checkpoints(tmp_path / "c").save(0, optimizer=checkpoint[1]).wait()
    with pytest.raises(tierstep.CheckpointMismatch, match="holds no model"):
        tierstep.export_checkpoint(folder, tmp_path / "out", to="safetensors")
    assert not list(tmp_path.glob("*out*"))


@alone
@pytest.mark.usefixtures("_pieces")
def test_dcp_loads_into_a_model_and_torchs_optimizer(checkpoint, tmp_path):
    model, optimizer, folder = checkpoint
    tierstep.export_checkpoint(folder, tmp_path / "out", to="dcp")
    other = Model(1)
    other_optimizer = torch.optim.AdamW(other.groups())
    weights, state = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "out")
    for name, value in model.state_dict().items():
        assert same_bits(weights[name], value)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=state)
    assert other_optimizer.param_groups[0]["lr"] == 0.01
    assert other_optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    found = other_optimizer.state[other.head]
    assert same_bits(found["exp_avg_sq"], optimizer.state[model.head]["exp_avg_sq"])
    assert found["step"] == 3


@alone
@pytest.mark.usefixtures("_pieces")
def test_dcp_has_the_exact_weights_and_moments_in_fp32(checkpoint, tmp_path):
    model, optimizer, folder = checkpoint
    tierstep.export_checkpoint(folder, tmp_path / "out", to="dcp")
    masters = {name: value for name, value in fp32_masters(model, optimizer).items() if name != "frozen"}
    target = {
        "fp32_weights": {name: torch.zeros_like(value) for name, value in masters.items()},
        "optimizer": {"state": {"embed": {"exp_avg": torch.zeros(40, 16)}}},
    }
    dcp.load(target, checkpoint_id=tmp_path / "out")
    assert all(same_bits(target["fp32_weights"][name], value) for name, value in masters.items())
    assert same_bits(target["optimizer"]["state"]["embed"]["exp_avg"], optimizer.state[model.embed]["exp_avg"])


@alone
def test_dcp_names_and_kinds_are_those_that_torch_writes(checkpoint, tmp_path):
    tierstep.export_checkpoint(checkpoint[2], tmp_path / "out", to="dcp")
    model = Model()
    weights, state = get_state_dict(model, torch.optim.AdamW(model.groups()))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "torch")
    ours, theirs = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("out", "torch"))
    kinds = {name: kind for name, kind in ours.state_dict_metadata.items() if not name.startswith("fp32_weights.")}
    moments = {name for name, kind in theirs.state_dict_metadata.items() if ".exp_avg" in name}
    assert kinds.keys() == theirs.state_dict_metadata.keys()
    for name, kind in theirs.state_dict_metadata.items():
        if name not in moments:  # which are fp32 here, and of the weight's dtype there
            assert kinds[name] == kind
    assert {name: ours.planner_data[name] for name in kinds} == theirs.planner_data
    assert ours.version == theirs.version


@pytest.mark.parametrize("shape", [(), (0,), (5,), (100,), (3, 4), (3, 50), (2, 3, 9), (2, 2, 40), (1, 100), (4, 0, 3)])
def test_boxes_cover_a_tensor_once_and_are_small(shape):
    values = torch.zeros(shape)
    for offsets, sizes in dcp_export._boxes(shape, 7):
        box = values[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert box.shape == sizes
        assert box.is_contiguous()
        assert box.numel() <= 7
        box += 1
    assert (values == 1).all()


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_folder_that_exists_is_refused_and_a_full_drive_leaves_nothing(checkpoint, tmp_path, to, monkeypatch):
    (tmp_path / "out").mkdir()
    with pytest.raises(tierstep.ConfigError, match="out exists already"):
        tierstep.export_checkpoint(checkpoint[2], tmp_path / "out", to=to)
    monkeypatch.setattr("tierstep.io.drafts.free_bytes", lambda directory: 1000)
    with pytest.raises(tierstep.DiskFull, match=r"\d+ are missing"):
        tierstep.export_checkpoint(checkpoint[2], tmp_path / "new", to=to)
    assert not list(tmp_path.glob("*new*"))
