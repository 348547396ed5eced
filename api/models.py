"""The model to train: a Llama of given sizes, or a local Hugging Face model. Nothing is ever downloaded."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from tierstep.configs.schema import Model, TrainConfig
from tierstep.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BYTE_VALUES = 256
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
UNREADABLE_WEIGHTS = (OSError, ValueError, ImportError, RuntimeError, EOFError, UnpicklingError, SafetensorError)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_model(config: TrainConfig) -> PreTrainedModel:
    """Return the model in training mode, on the CPU, in `[model] dtype`; the same for the same seed.

    Seeds torch's generators with `[run] seed`. Raises `ConfigError` when the named model is missing, unreadable, or
    too small for bytes or for `sequence_length`.
    """
    torch.manual_seed(config.run.seed)
    architecture, weights = _architecture(config.model)
    _check_sizes(architecture, config)
    return _made_ready(_with_random_weights(architecture) if weights is None else _with_weights(weights), config.model)


def outline_model(config: TrainConfig) -> PreTrainedModel:
    """Return what `build_model` would, but without reading weights; inside torch's fake mode it takes no memory."""
    architecture, _ = _architecture(config.model)
    _check_sizes(architecture, config)
    return _made_ready(_with_random_weights(architecture), config.model)


def _made_ready(model: PreTrainedModel, config: Model) -> PreTrainedModel:
    for parameter in model.parameters():  # and no buffers: the frequencies of rotary positions need their fp32
        parameter.data = parameter.data.to(DTYPES[config.dtype])
    model.config.use_cache = False
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    model.train()
    return model


def _architecture(config: Model) -> tuple[PretrainedConfig, Path | None]:
    """Return a transformers configuration, and the folder of its weights where there are some."""
    if config.path is None:
        return _llama(config), None
    path = config.path
    if not path.exists():
        raise ConfigError(f"[model] path = '{path}' does not exist: name a local Hugging Face folder or config.json")
    from transformers import AutoConfig

    try:
        architecture = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"[model] path = '{path}' is no Hugging Face model: {_first_line(error)}") from error
    has_weights = path.is_dir() and any(file for pattern in WEIGHT_FILES for file in path.glob(pattern))
    return architecture, path if has_weights else None


def _llama(config: Model) -> PretrainedConfig:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,  # bytes have no special tokens
        eos_token_id=None,
    )


def _check_sizes(architecture: PretrainedConfig, config: TrainConfig) -> None:
    vocabulary = getattr(architecture, "vocab_size", None) or 0
    if vocabulary < BYTE_VALUES:
        raise ConfigError(
            f"[model] path = '{config.model.path}' has a vocabulary of {vocabulary}: bytes need {BYTE_VALUES} or more"
        )
    longest = getattr(architecture, "max_position_embeddings", None)
    if longest is not None and config.data.sequence_length > longest:
        raise ConfigError(
            f"[data] sequence_length = {config.data.sequence_length} is more than the {longest} positions of the "
            f"model: lower it"
        )


def _with_random_weights(architecture: PretrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(architecture, trust_remote_code=False)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"[model] is no causal language model: {_first_line(error)}") from error


def _with_weights(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except UNREADABLE_WEIGHTS as error:
        raise ConfigError(f"[model] path = '{folder}': weights cannot be loaded: {_first_line(error)}") from error


def _checkpoint_activations(model: PreTrainedModel) -> None:
    # transformers renamed the method, and deprecated the old name, in version 5
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"[model] activation_checkpointing = true: {_first_line(error)}; set it to false") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
