"""The states of the random generators that a training run draws from."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_states() -> dict[str, Any]:
    """Return the states of torch's generators, Python's, and NumPy's global one if NumPy is in use."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Put the generators back to what `rng_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        import numpy as np

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
