"""A parameter as the engine sees it: a name, flat weights, a flat gradient. Who shards is an adapter's job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierstep.errors import ConfigError, GradientError

TRAINABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Shard:
    """One trainable parameter, as it was when the optimizer took it. `group` is its position in `param_groups`.

    Flat order is the logical (row-major) order of the elements, whatever the parameter's strides are.
    """

    name: str
    parameter: torch.Tensor
    group: int
    numel: int
    dtype: torch.dtype
    device: torch.device

    def require_unchanged(self) -> None:
        """Raise `ConfigError` when the parameter was converted, resized or moved since: its record does not fit."""
        now = self.parameter
        if (now.numel(), now.dtype, now.device) != (self.numel, self.dtype, self.device):
            raise ConfigError(
                f"parameter {self.name} had {self.numel} elements of {self.dtype} on {self.device} when the optimizer "
                f"was made and has {now.numel()} of {now.dtype} on {now.device} now: convert and move the model first, "
                f"then make the optimizer"
            )

    def weights(self, start: int, stop: int) -> torch.Tensor:
        """Return elements of the flat weights, 1-D and contiguous: a view where the strides allow it, else a copy."""
        weight = self.parameter.detach()
        if weight.is_contiguous():
            return weight.view(-1)[start:stop]
        return weight.take(torch.arange(start, stop, device=weight.device))

    def put_weights(self, start: int, stop: int, values: torch.Tensor) -> None:
        """Set elements of the flat weights (`values` may be on another device); nothing to do for a view of them."""
        weight = self.parameter.detach()
        if weight.is_contiguous():
            here = weight.view(-1)[start:stop]
            if here.data_ptr() != values.data_ptr():
                here.copy_(values, non_blocking=True)
        else:
            places = torch.unravel_index(torch.arange(start, stop, device=weight.device), weight.shape)
            weight[places] = values.to(weight.device, non_blocking=True)

    def gradient(self) -> torch.Tensor | None:
        """Return the flat gradient, 1-D and contiguous (a view where the strides allow it); None when there is none.

        Raises `GradientError` for a sparse gradient.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            raise GradientError(
                f"the gradient of {self.name} is sparse ({gradient.layout}); AdamW needs dense gradients: "
                f"use sparse=False in the embedding, or torch.optim.SparseAdam for this parameter"
            )
        if gradient.dtype not in TRAINABLE_DTYPES:
            raise GradientError(f"the gradient of {self.name} is {gradient.dtype}; supported: {_names()}")
        return gradient.detach().reshape(-1)


def trainable_shards(param_groups: Sequence[Mapping[str, Any]]) -> Iterator[Shard]:
    """Yield the parameters of torch param groups that ask for gradients now, with their names.

    Parameters given without names are called `group0.param3` by their position, which is stable from run to run.
    Raises `ConfigError` for a parameter that cannot be trained, for one that is given twice, for two of one name, and
    for parameters on different devices.
    """
    device: torch.device | None = None
    names_taken: set[str] = set()
    given: set[int] = set()
    for group_index, (group, names) in enumerate(zip(param_groups, parameter_names(param_groups), strict=True)):
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter.requires_grad:
                _check_trainable(name, parameter)
                if name in names_taken:
                    raise ConfigError(f"two parameters have the name {name}: names identify state, make them differ")
                if id(parameter) in given:
                    raise ConfigError(f"parameter {name} is given twice: give each parameter once")
                device = device or parameter.device
                if parameter.device != device:
                    raise ConfigError(
                        f"parameter {name} is on {parameter.device} and others are on {device}: one optimizer works "
                        f"on one device; make one for each, or move the model"
                    )
                names_taken.add(name)
                given.add(id(parameter))
                yield Shard(name, parameter, group_index, parameter.numel(), parameter.dtype, device)


def parameter_names(param_groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the names of all parameters, frozen ones too, group by group; by position where none were given."""
    return [
        list(group.get("param_names") or [f"group{index}.param{i}" for i in range(len(group["params"]))])
        for index, group in enumerate(param_groups)
    ]


def _check_trainable(name: str, parameter: torch.Tensor) -> None:
    if parameter.dtype not in TRAINABLE_DTYPES:
        raise ConfigError(
            f"parameter {name} is {parameter.dtype}; tierstep trains {_names()}: convert it, or set requires_grad=False"
        )
    if parameter.layout is not torch.strided:
        raise ConfigError(f"parameter {name} is sparse ({parameter.layout}); tierstep trains dense parameters")
    if parameter.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"parameter {name} is on {parameter.device}; tierstep trains on the CPU and on CUDA devices")


def _names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in TRAINABLE_DTYPES)
