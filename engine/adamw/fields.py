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
    """
    return _FIELDS[weight_dtype]
