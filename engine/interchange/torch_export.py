"""A checkpoint as one file that `torch.optim.AdamW.load_state_dict` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tierstep.engine.interchange.source import CheckpointSource, StreamedTensor
from tierstep.engine.interchange.torch_file import write_torch_file
from tierstep.engine.interchange.transfer import Exported, Meter
from tierstep.io.drafts import new_file

HEADER_BYTES = 1024  # what a tensor takes at most in the file beside its bytes, a name of ordinary length included


def export_torch(source: CheckpointSource, target: Path, meter: Meter) -> Exported:
    """Write state, groups and exact weights into a new file. Blocks; see `export_checkpoint`."""
    fp32_weights = source.fp32_weights()
    value = {
        **_torch_state(source),
        "fp32_weights": fp32_weights,
        "weight_dtypes": {parameter.name: parameter.dtype for parameter in source.optimizer.parameters},
    }
    tensors = [tensor for entry in value["state"].values() for tensor in entry.values()] + list(fp32_weights.values())
    nbytes = sum(tensor.nbytes for tensor in tensors)
    meter.expect(nbytes)
    with new_file(target, nbytes + HEADER_BYTES * (len(tensors) + 1)) as file:
        write_torch_file(file, value, meter.add)
        nbytes = file.tell()
    return Exported(target, nbytes, source.without_weights())


def scalar(value: int) -> StreamedTensor:
    """Return a step count as torch's AdamW keeps it: an fp32 tensor without axes."""
    return StreamedTensor(torch.float32, (), lambda start, stop: torch.tensor([float(value)]))


def _torch_state(source: CheckpointSource) -> dict[str, Any]:
    """Return the state dict that torch's AdamW would have, its tensors not read yet."""
    parameters = {parameter.name: parameter for parameter in source.optimizer.parameters}
    state, groups, count = {}, [], 0
    for group in source.groups():
        numbers = range(count, count + len(group.names))
        count += len(group.names)
        for number, name in zip(numbers, group.names, strict=True):
            parameter = parameters.get(name)
            if parameter is not None and parameter.step:
                state[number] = {"step": scalar(parameter.step), **source.moments(parameter)}
        groups.append({**group.hyperparameters, "param_names": group.names, "params": list(numbers)})
    return {"state": state, "param_groups": groups}
