"""The gradients of one step: collected once, checked, measured, and recognised again after an interruption."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from tierstep.engine.adamw.kernels import CpuKernel
from tierstep.engine.shards import Shard
from tierstep.errors import GradientError

NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Gradients:
    """Flat gradients of all shards at one moment (None where a shard has none), and a fingerprint of them."""

    flat: tuple[torch.Tensor | None, ...]
    fingerprint: tuple[tuple[int, int] | None, ...]

    def touched(self) -> list[int]:
        """Return the positions of the shards that have a gradient."""
        return [position for position, gradient in enumerate(self.flat) if gradient is not None]


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


def check_finite(gradients: Gradients, shards: Sequence[Shard], kernel: CpuKernel, threads: int) -> None:
    """Raise `GradientError` that names the first parameters with NaN or inf in their gradients."""
    bad = [
        shards[position].name
        for position in gradients.touched()
        if not kernel.all_finite(_present(gradients, position), threads=threads)
    ]
    if bad:
        others = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise GradientError(
            f"NaN or inf in the gradient of {', '.join(bad[:3])}{others}; nothing was updated: "
            f"call zero_grad() to skip this step, and look at the loss and the learning rate"
        )


def total_norm(gradients: Gradients, kernel: CpuKernel, threads: int) -> float:
    """Return the 2-norm of all gradients together, the same whatever the number of threads."""
    blocks = (
        kernel.sum_squares(_present(gradients, position), threads=threads).tolist() for position in gradients.touched()
    )
    try:
        return math.sqrt(math.fsum(block for part in blocks for block in part))
    except (ValueError, OverflowError):  # fsum refuses inf - inf and sums beyond the largest double
        return math.nan


def measure_clip(gradients: Gradients, max_norm: float, kernel: CpuKernel, threads: int, before: Clip | None) -> Clip:
    """Measure the norm and the factor that brings it down to `max_norm`, as torch.nn.utils.clip_grad_norm_ does.

    `before` is what an earlier call has found for the same step: its factor counts as applied.
    """
    applied = before.factor if before is not None and before.gradients.fingerprint == gradients.fingerprint else 1.0
    norm = total_norm(gradients, kernel, threads) * applied
    return Clip(gradients, norm, applied * min(1.0, max_norm / (norm + NORM_EPS)))


def _present(gradients: Gradients, position: int) -> torch.Tensor:
    gradient = gradients.flat[position]
    if gradient is None:
        raise ValueError(f"shard {position} has no gradient")
    return gradient
