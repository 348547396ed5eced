"""The gradients of one step: collected once, checked, measured, and recognised again after an interruption."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from tierstep.engine.shards import Shard

NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Gradients:
    """Flat gradients of all shards at one moment (None where a shard has none), and a fingerprint of them."""

    flat: tuple[torch.Tensor | None, ...]
    fingerprint: tuple[tuple[int, int] | None, ...]

    def touched(self) -> list[int]:
        """Return the positions of the shards that have a gradient."""
        return [position for position, gradient in enumerate(self.flat) if gradient is not None]

    def of(self, position: int) -> torch.Tensor:
        """Return the gradient of a shard that has one."""
        gradient = self.flat[position]
        if gradient is None:
            raise ValueError(f"shard {position} has no gradient")
        return gradient


@dataclass(frozen=True)
class Clip:
    """What `clip_grad_norm_` found, for the step that follows: of which gradients, their norm and the factor.

    It keeps the gradients alive, so that no later one can be taken for one of them.
    """

    gradients: Gradients
    norm: float
    factor: float

    def is_of_former(self, gradients: Gradients) -> bool:
        """Say whether none of the gradients that were measured is there any more: the clip was for a skipped step."""
        measured = {place[0] for place in self.gradients.fingerprint if place is not None}
        return not any(place is not None and place[0] in measured for place in gradients.fingerprint)

    @property
    def norm_is_finite(self) -> bool:
        """Whether the norm proves that every gradient is finite."""
        return math.isfinite(self.norm)


def collect(shards: Sequence[Shard], present: Container[int]) -> Gradients:
    """Look once at the gradient of every shard whose parameter's id is `present`; the others count as having none.

    Raises `GradientError` for one that cannot be used, `ConfigError` for a parameter that was converted or resized.
    """
    for shard in shards:
        shard.require_unchanged()
    flat = tuple(shard.gradient() if id(shard.parameter) in present else None for shard in shards)
    return Gradients(flat, fingerprint(shards))


def fingerprint(shards: Sequence[Shard]) -> tuple[tuple[int, int] | None, ...]:
    """Return what changes when a gradient is replaced or edited: its address and torch's version counter."""
    gradients = (shard.parameter.grad for shard in shards)
    return tuple(None if g is None else (g.data_ptr(), g._version) for g in gradients)


def fold(sums: torch.Tensor) -> torch.Tensor:
    """Add up a 1-D fp64 tensor: the second half onto the first, until one number is left. None give zero.

    The order of additions depends on the length alone, so every device gets the same bits.
    """
    while sums.numel() > 1:
        half = sums.numel() // 2
        sums = torch.cat([sums[:half] + sums[half : 2 * half], sums[2 * half :]])
    return sums.sum()


def clip_to(gradients: Gradients, norm: float, max_norm: float, before: Clip | None) -> Clip:
    """Return the factor that brings gradients of 2-norm `norm` down to `max_norm`, as torch's clip_grad_norm_ does.

    `before` is what an earlier call has found for the same step: its factor counts as applied.
    """
    applied = before.factor if before is not None and before.gradients.fingerprint == gradients.fingerprint else 1.0
    norm *= applied
    return Clip(gradients, norm, applied * min(1.0, max_norm / (norm + NORM_EPS)))
