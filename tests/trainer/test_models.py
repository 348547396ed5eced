import json

import pytest
import torch

from tierstep.configs.schema import TrainConfig
from tierstep.errors import ConfigError
from tierstep.models import build_model

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position": 64,
}


def config(seed=0, sequence_length=16, **model):
    sizes = {} if "path" in model else TINY
    return TrainConfig(
        model={**sizes, **model}, run={"seed": seed}, data={"sequence_length": sequence_length, "batch_size": 1}
    )


def weights(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


@pytest.fixture
def folder(tmp_path):
    model = build_model(config())
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_a_model_has_the_sizes_and_type_that_were_asked_for():
    model = build_model(config(dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.hidden_size == 32
    assert model.training
    assert not model.config.use_cache


def test_initial_weights_depend_on_the_seed_alone():
    first = weights(build_model(config(seed=3)))
    torch.rand(5)
    assert torch.equal(first, weights(build_model(config(seed=3))))
    assert not torch.equal(first, weights(build_model(config(seed=4))))


def test_tied_embeddings_are_one_tensor():
    model = build_model(config(tie_word_embeddings=True))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_activation_checkpointing_changes_no_bit():
    tokens = torch.arange(16)[None]
    grads = []
    for checkpointing in (False, True):
        model = build_model(config(activation_checkpointing=checkpointing))
        model(input_ids=tokens, labels=tokens).loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*grads)


def test_a_local_folder_brings_its_weights(folder):
    assert torch.equal(weights(build_model(config(path=folder, seed=9))), weights(build_model(config())))


def test_a_local_config_brings_sizes_only(folder):
    model = build_model(config(path=folder / "config.json", seed=9))
    assert torch.equal(weights(model), weights(build_model(config(seed=9))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 100}, "vocabulary of 100: bytes need 256"),
        ({"max_position_embeddings": 8}, "sequence_length = 16 is more than the 8 positions"),
        ({"model_type": "nonsense"}, "is no Hugging Face model"),
        ({"model_type": "t5"}, "is no causal language model"),
    ],
)
def test_an_unsuitable_model_is_refused(folder, change, message):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        build_model(config(path=path))


def test_a_missing_model_is_refused_and_never_looked_for_elsewhere():
    with pytest.raises(ConfigError, match="gpt2' does not exist: name a local"):
        build_model(config(path="gpt2"))


def test_a_folder_that_holds_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no Hugging Face model"):
        build_model(config(path=tmp_path))


def test_damaged_weights_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="weights cannot be loaded"):
        build_model(config(path=folder))
