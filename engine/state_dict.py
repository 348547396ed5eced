"""torch's view of the state: `optimizer.state`, and state dicts in torch's AdamW layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.shards import Shard
from tierstep.engine.stepper import Stepper
from tierstep.engine.training_state import TrainingState
from tierstep.errors import CheckpointMismatch


class StateView(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """`optimizer.state`: reading `state[p]` gathers copies of one parameter's state from wherever it lies. Blocks.

    Holds the parameters that were updated at least once, like torch's. Changing what it returns changes nothing:
    use `load_state_dict` for that.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
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


def load_state(
    optimizer: torch.optim.Optimizer, state: TrainingState, stepper: Stepper, given: Mapping[str, Any]
) -> None:
    """Check a state dict in torch's layout against the optimizer, then take it over. See `AdamW.load_state_dict`."""
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
    for group, saved in zip(optimizer.param_groups, given["param_groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
    stepper.replace_state(lambda: state.scatter(entries))
    state.steps[:] = [int(entries[i]["step"]) if i in entries else 0 for i in range(len(state.shards))]


def _match_groups(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> dict[object, torch.Tensor]:
    """Return the parameter behind each key of the given state, by position, as torch matches them."""
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
    for name, _ in record_fields(shard.parameter.dtype):
        if name in entry and entry[name].shape != shard.parameter.shape:
            raise CheckpointMismatch(
                f"{name} of {shard.name} has shape {tuple(entry[name].shape)}, the parameter "
                f"{tuple(shard.parameter.shape)}: this is the state of another model"
            )
    return entry
