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
    """One trainable parameter. `group` is its position in `optimizer.param_groups`.

    Flat order is the logical (row-major) order of the elements, whatever the parameter's strides are.
    """

    name: str
    parameter: torch.Tensor
    group: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.parameter.numel()

    def weights(self, start: int, stop: int) -> torch.Tensor:
        """Return elements of the flat weights, 1-D and contiguous: a view where the strides allow it, else a copy."""
        weight = self.parameter.detach()
        if weight.is_contiguous():
            return weight.view(-1)[start:stop]
        return weight.take(torch.arange(start, stop, device=weight.device))

    def put_weights(self, start: int, stop: int, values: torch.Tensor) -> None:
        """Write back what `weights` returned, where that was a copy; a view needs no writing back."""
        weight = self.parameter.detach()
        if not weight.is_contiguous():
            weight.put_(torch.arange(start, stop, device=weight.device), values)

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
    Raises `ConfigError` for a parameter that cannot be trained, and for two of one name.
    """
    taken: set[str] = set()
    for group_index, group in enumerate(param_groups):
        names = group.get("param_names") or [f"group{group_index}.param{i}" for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter.requires_grad:
                _check_trainable(name, parameter)
                if name in taken:
                    raise ConfigError(f"two parameters have the name {name}: names identify state, make them differ")
                taken.add(name)
                yield Shard(name, parameter, group_index)


def _check_trainable(name: str, parameter: torch.Tensor) -> None:
    if parameter.dtype not in TRAINABLE_DTYPES:
        raise ConfigError(
            f"parameter {name} is {parameter.dtype}; tierstep trains {_names()}: convert it, or set requires_grad=False"
        )
    if parameter.layout is not torch.strided:
        raise ConfigError(f"parameter {name} is sparse ({parameter.layout}); tierstep trains dense parameters")
    if parameter.device.type != "cpu":
        raise ConfigError(
            f"parameter {name} is on {parameter.device}; this version updates parameters on the CPU only: "
            f"keep the model on the CPU"
        )


def _names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in TRAINABLE_DTYPES)
