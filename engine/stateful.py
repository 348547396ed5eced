"""Schedulers, scalers, data loaders: what keeps its state by torch's convention and is saved beside the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from tierstep.errors import CheckpointMismatch, ConfigError


class Stateful(Protocol):
    """What `torch.optim.lr_scheduler`, `GradScaler` and torchdata's `StatefulDataLoader` have in common."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, strings, lists, tuples, dicts and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:  # noqa: ANN401
        """Take over what `state_dict` has returned."""
        ...


def given_parts(**parts: Stateful | None) -> dict[str, Stateful]:
    """Return the parts that are there, by name. Raises `ConfigError` for one without the two methods."""
    given = {name: part for name, part in parts.items() if part is not None}
    for name, part in given.items():
        if not all(callable(getattr(part, method, None)) for method in ("state_dict", "load_state_dict")):
            raise ConfigError(
                f"{name} is a {type(part).__name__}: give an object that has state_dict() and load_state_dict()"
            )
    return given


def require_saved(parts: Mapping[str, Stateful], states: Mapping[str, Any], folder: Path) -> None:
    """Raise `CheckpointMismatch` for a part of which a checkpoint has no state."""
    for name in parts:
        if name not in states:
            raise CheckpointMismatch(f"{folder} holds no {name}: it was saved without one; restore without it")


def load_states(parts: Mapping[str, Stateful], states: Mapping[str, Any], folder: Path) -> None:
    """Have every part take its state over.

    Raises `CheckpointMismatch` naming a part that refuses its state, when all have their former states again; only
    what `data` changes before it refuses stays, because asking a data loader for its state can start its workers.
    """
    with ExitStack() as undo:
        for name, part in parts.items():
            if name != "data":
                undo.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
            try:
                part.load_state_dict(states[name])
            except Exception as error:  # noqa: BLE001 - whatever a user's class raises
                raise CheckpointMismatch(
                    f"the {name} cannot take over its state from {folder} ({type(error).__name__}: {error}): "
                    f"give one that was made as the saved one was"
                ) from error
        undo.pop_all()
