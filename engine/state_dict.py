"""torch's view of the state: `optimizer.state`, and state dicts in torch's AdamW layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.hyperparameters import check_hyperparameters
from tierstep.engine.shards import Shard
from tierstep.engine.stepper import Stepper
from tierstep.engine.training_state import TrainingState
from tierstep.errors import CheckpointMismatch, ConfigError


class StateView(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """`optimizer.state`: reading `state[p]` gathers copies of one parameter's state from wherever it lies. Blocks.

    Holds the parameters that were updated at least once, like torch's. Changing what it returns changes nothing:
    use `load_state_dict` for that.
    """

    def __init__(self, state: TrainingState, stepper: Stepper) -> None:
        self._state = state
        self._stepper = stepper

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        self._stepper.require_whole("read the state")
        for position, shard in enumerate(self._state.shards):
            if shard.parameter is parameter and self._state.steps[position]:
                step = torch.tensor(float(self._state.steps[position]))
                return {"step": step, **self._state.gather(position)}
        raise KeyError("no state: the parameter was never updated, or is not one of this optimizer's")

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (shard.parameter for shard, step in zip(self._state.shards, self._state.steps, strict=True) if step)

    def __len__(self) -> int:
        return sum(step > 0 for step in self._state.steps)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is known for known in self)


def load_state(optimizer: torch.optim.Optimizer, state: TrainingState, stepper: Stepper, given: dict[str, Any]) -> None:
    """Check a state dict in torch's layout against the optimizer, then take it over. See `AdamW.load_state_dict`."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, given)
        given = given if replaced is None else replaced
    positions = _match_groups(optimizer, given)
    by_parameter = {id(shard.parameter): position for position, shard in enumerate(state.shards)}
    entries: dict[int, Mapping[str, Any]] = {}
    for key, entry in given["state"].items():
        parameter = positions.get(key)
        if parameter is None or id(parameter) not in by_parameter:
            raise CheckpointMismatch(
                f"the state dict has state for parameter {key}, which this optimizer does not train: "
                f"give it the same parameters, with the same ones frozen"
            )
        position = by_parameter[id(parameter)]
        entries[position] = _checked(state.shards[position], entry)
    groups = [
        checked_group(group, saved) for group, saved in zip(optimizer.param_groups, given["param_groups"], strict=True)
    ]

    def replace() -> None:
        state.scatter(entries)
        state.steps[:] = [int(entries[i]["step"]) if i in entries else 0 for i in range(len(state.shards))]
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)

    stepper.replace_state(replace)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def checked_group(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the hyperparameters of a saved param group. Raises `CheckpointMismatch` for what cannot be."""
    if not isinstance(saved, Mapping):
        raise CheckpointMismatch(f"a saved param group is a {type(saved).__name__} instead of a dict")
    found = {key: copy.deepcopy(value) for key, value in saved.items() if key not in ("params", "param_names")}
    try:
        check_hyperparameters({**group, **found})
    except ConfigError as error:
        raise CheckpointMismatch(f"a saved param group cannot be used: {error}") from error
    return found


def _match_groups(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> dict[object, torch.Tensor]:
    """Return the parameter behind each key of the given state, by position, as torch matches them."""
    if not isinstance(given, Mapping) or "state" not in given or "param_groups" not in given:
        raise CheckpointMismatch("this is no optimizer's state dict: it has no state or no param_groups")
    groups, saved_groups = optimizer.param_groups, given["param_groups"]
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved_groups]
    if sizes != saved_sizes:
        raise CheckpointMismatch(
            f"the state dict has param groups of {saved_sizes} parameters, this optimizer of {sizes}: "
            f"give it the same groups"
        )
    return {
        key: parameter
        for group, saved in zip(groups, saved_groups, strict=True)
        for key, parameter in zip(saved["params"], group["params"], strict=True)
    }


def _checked(shard: Shard, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in entry]
    if missing:
        raise CheckpointMismatch(
            f"the state of {shard.name} lacks {', '.join(missing)}: it is not that of an AdamW optimizer"
        )
    step = float(entry["step"])
    if not (step >= 0 and step == int(step)):
        raise CheckpointMismatch(f"the state of {shard.name} has step {step}: give a whole number, 0 or more")
    found: dict[str, Any] = {"step": int(step)}
    for name, dtype in record_fields(shard.dtype):
        value = entry.get(name)
        if name == "low" and isinstance(value, torch.Tensor) and value.dtype != dtype:
            continue  # torch.optim.AdamW has cast it to the parameter's dtype: what it said is gone
        if value is not None:
            found[name] = _checked_field(shard, name, value)
    return found


def _checked_field(shard: Shard, name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise CheckpointMismatch(
            f"{name} of {shard.name} is no dense tensor: this is not the state of an AdamW optimizer"
        )
    if value.shape != shard.parameter.shape:
        raise CheckpointMismatch(
            f"{name} of {shard.name} has shape {tuple(value.shape)}, the parameter "
            f"{tuple(shard.parameter.shape)}: this is the state of another model"
        )
    return value
