"""What AdamW keeps of an element, by the dtype of its weight."""

from __future__ import annotations

import torch

_MOMENTS = (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))
_FIELDS = {
    torch.bfloat16: (("low", torch.int16), *_MOMENTS),
    torch.float16: (("master", torch.float32), *_MOMENTS),
    torch.float32: _MOMENTS,
}


def record_fields(weight_dtype: torch.dtype) -> tuple[tuple[str, torch.dtype], ...]:
    """Return the names and dtypes of the fields of a record, in their order.

    bf16 weights are the upper half of an fp32 master whose lower half is `low`; fp16 weights have a full `master`;
    fp32 weights are their own. Fields of zeros are the right state of a parameter that was never updated.

    Weights may be changed between updates. An fp16 weight that its master does not round to wins over it; a bf16 weight
    keeps its `low`, which is less than its last bit, except that a zero above a negative `low` (the bits of a NaN)
    is zero.
    """
    return _FIELDS[weight_dtype]


def weight_bytes_per_element(fields: tuple[tuple[str, torch.dtype], ...]) -> int:
    """Return how long an element of the weights is whose record has these fields."""
    return next(dtype.itemsize for dtype, known in _FIELDS.items() if known == fields)
