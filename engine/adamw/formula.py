"""The AdamW update rule (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2).

For a weight w with gradient g, moments m and v, in step t (from 1), each operation rounded to fp32 on its own:

    g = g * grad_scale
    w = w * (1 - lr * weight_decay)
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    w = w - step_size * (m / (sqrt(v) * inv_sqrt_bias2 + eps))

with step_size = lr / (1 - beta1^t) and inv_sqrt_bias2 = 1 / sqrt(1 - beta2^t). The numbers that are the same for all
elements are computed once, in double precision, and rounded to fp32, so every implementation gets equal ones.
"""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Scalars:
    """The numbers of one step for one param group; each is exactly an fp32 value."""

    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    inv_sqrt_bias2: float
    eps: float
    grad_scale: float

    def values(self) -> tuple[float, ...]:
        """Return the numbers in their order, for a kernel."""
        return astuple(self)


def scalars(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    maximize: bool = False,
) -> Scalars:
    """Compute the numbers of step `step` (from 1). `maximize` turns the gradient round, as torch does."""
    beta1, beta2 = betas
    return Scalars(
        decay=_fp32(1 - lr * weight_decay),
        beta1=_fp32(beta1),
        one_minus_beta1=_fp32(1 - beta1),
        beta2=_fp32(beta2),
        one_minus_beta2=_fp32(1 - beta2),
        step_size=_fp32(lr / (1 - beta1**step)),
        inv_sqrt_bias2=_fp32(1 / math.sqrt(1 - beta2**step)),
        eps=_fp32(eps),
        grad_scale=_fp32(-grad_scale if maximize else grad_scale),
    )


def _fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
