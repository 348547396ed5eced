"""What one checkpoint will hold beside the optimizer: collected and checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tierstep.engine.extras import encode
from tierstep.engine.rng import rng_states
from tierstep.engine.stateful import Stateful
from tierstep.engine.tensor_file import require_storable, tensors_nbytes
from tierstep.errors import ConfigError


@dataclass(frozen=True)
class Contents:
    """Weights by name, names tied to one of those, and JSON values whose tensors are in `tensors`. No copies yet."""

    weights: dict[str, torch.Tensor] | None
    tied: dict[str, str]
    tensors: dict[str, torch.Tensor]
    rng: Any
    states: dict[str, Any]
    extra: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the files that hold the tensors."""
        return tensors_nbytes(self.weights or {}) + tensors_nbytes(self.tensors)

    def copied(self) -> Contents:
        """Return the same with copies of all tensors on the CPU, which nobody changes. Blocks."""
        weights = None if self.weights is None else _copies(self.weights)
        return replace(self, weights=weights, tensors=_copies(self.tensors))


def collect(model: torch.nn.Module | None, parts: Mapping[str, Stateful], extra: Mapping[str, Any]) -> Contents:
    """Return what is to be saved. Raises `ConfigError` that names what a checkpoint cannot hold."""
    tensors: dict[str, torch.Tensor] = {}
    weights, tied = (None, {}) if model is None else _unique(_tensors_of(model))
    contents = Contents(
        weights=weights,
        tied=tied,
        tensors=tensors,
        rng=encode(rng_states(), tensors, "rng"),
        states={name: encode(part.state_dict(), tensors, name) for name, part in parts.items()},
        extra=encode(dict(extra), tensors, "extra"),
    )
    require_storable({**(weights or {}), **tensors})
    return contents


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = model.state_dict()
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{name} in the model's state dict is a {type(value).__name__}: put what is no tensor into extra"
            )
    return dict(found)


def _unique(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Split a model's state dict into tensors of their own and names that are tied to one of those."""
    unique: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[object, ...], str] = {}
    for name, tensor in weights.items():
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and identity in owners:
            tied[name] = owners[identity]
        else:
            owners[identity] = name
            unique[name] = tensor
    return unique, tied


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
