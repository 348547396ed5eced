"""What an update works on."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tierstep.engine.adamw.formula import Scalars


class Piece(NamedTuple):
    """Consecutive elements of one parameter within a record.

    `weight` (bf16, fp16 or fp32) and `grad` (any of these) are 1-D, contiguous and of equal length; `start` is their
    first element's place in the record's fields. The update writes `weight` in place.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    start: int
    scalars: Scalars
