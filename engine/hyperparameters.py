"""What a param group may say, checked wherever one comes from: constructor, user, state dict or checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tierstep.errors import ConfigError


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a param group with values that AdamW, or this AdamW, cannot work with."""
    for key, top in (("lr", math.inf), ("eps", math.inf), ("weight_decay", math.inf)):
        if not 0 <= _number(key, group[key]) < top:
            raise ConfigError(f"{key}={group[key]} is out of range: give a number that is not negative")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas={betas!r}: give two numbers from 0 to below 1")
    if not all(0 <= _number("betas", beta) < 1 for beta in betas):
        raise ConfigError(f"betas={betas} is out of range: give two numbers from 0 to below 1")
    for key in ("amsgrad", "capturable", "differentiable"):
        if group.get(key):
            raise ConfigError(f"{key}=True is not supported by tierstep.AdamW: leave it out")


def _number(key: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{key}={value!r} is not a number: give one") from error
