"""User data in a checkpoint: JSON values and tensors, nested as the user likes, and no pickle.

JSON has neither tuples, nor dicts with keys other than strings, nor tensors. Each is written as an object with one
reserved key, so that decoding gives back equal values of the same types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tierstep.errors import ConfigError

MAX_INT_BITS = 4096  # more than that Python refuses to write as decimal digits
TENSOR, TUPLE, DICT, COUNTER = "__tensor__", "__tuple__", "__dict__", "__counter__"


def encode(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:  # noqa: ANN401
    """Return `value` as JSON values; its tensors are added to `tensors` under their place, such as `extra.data.seen`.

    Tuples, counters and keys of any kind are kept; subclasses of dict, tuple and int come back as what they derive
    from. Raises `ConfigError` that names the place of a value that a checkpoint cannot hold.
    """
    try:
        return _encode(value, tensors, where)
    except RecursionError as error:
        raise ConfigError(f"{where} is nested too deeply, or holds itself: flatten it") from error


def _encode(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:  # noqa: ANN401
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_INT_BITS:
            raise ConfigError(f"{where} is an integer of {value.bit_length()} bits: give it as text")
        return int(value)
    if isinstance(value, torch.Tensor):
        return {TENSOR: _add_tensor(value, tensors, where)}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _encode(value.item(), tensors, where)
    if isinstance(value, (list, tuple)):
        items = [_encode(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, where)
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: "
        f"give numbers, strings, lists, tuples, dicts and tensors"
    )


def _add_tensor(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], where: str) -> str:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        raise ConfigError(f"{where} is a tensor without plain memory ({tensor.layout}): give a dense one")
    name = where if where not in tensors else f"{where}#{len(tensors)}"  # two places may read alike: a.b and a, b
    tensors[name] = tensor.detach()
    return name


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], where: str) -> Any:  # noqa: ANN401
    plain = all(isinstance(key, str) and not key.startswith("__") for key in value)
    if plain and not isinstance(value, Counter):
        return {key: _encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
    pairs = [
        [_encode(key, tensors, f"{where}.key{i}"), _encode(item, tensors, f"{where}.{i}")]
        for i, (key, item) in enumerate(value.items())
    ]
    return {COUNTER if isinstance(value, Counter) else DICT: pairs}


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401
    """Return what `encode` was given."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if TUPLE in value:
        return tuple(decode(item, tensors) for item in value[TUPLE])
    if DICT in value or COUNTER in value:
        pairs = value[COUNTER if COUNTER in value else DICT]
        decoded = {decode(key, tensors): decode(item, tensors) for key, item in pairs}
        return Counter(decoded) if COUNTER in value else decoded
    return {key: decode(item, tensors) for key, item in value.items()}
