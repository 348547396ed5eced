"""Taking a checkpoint elsewhere: verified first, then streamed into another format, and there only when it is whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstep.engine.interchange.source import CheckpointSource, StreamedTensor
from tierstep.engine.interchange.torch_file import write_torch_file
from tierstep.engine.manifest import read_manifest
from tierstep.engine.restoring import saved_nbytes, verify_files
from tierstep.errors import ConfigError
from tierstep.io.drafts import new_file, require_absent

HEADER_BYTES = 1024  # what a tensor takes at most in a file beside its bytes, a name of ordinary length included
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Exported:
    """What an export wrote. `without_weights` are trained parameters of which the checkpoint holds no weight."""

    path: Path
    nbytes: int
    without_weights: tuple[str, ...]


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "torch",
    on_progress: OnProgress = lambda done, total: None,
) -> Exported:
    """Write the checkpoint (a `step-*` folder) to the new file or folder `target` in another format. Blocks.

    `to="torch"`: one file with the `state_dict` of `torch.optim.AdamW`: `state` and `param_groups` (with
    `param_names`), fp32; beside them `fp32_weights`, the exact fp32 weight of each trained parameter by its name, and
    `weight_dtypes`, the dtypes of the model's weights, which torch's optimizer passes over.

    Every byte of the checkpoint is verified first. Takes memory for a few pieces of 16 MiB, whatever the model's size;
    `on_progress(done, total)` has bytes read and written. `target` is there when it is whole and durable, or not at
    all. Raises `ConfigError` for a target that exists and an unknown format, `CheckpointCorrupt`, `CheckpointMismatch`
    for a checkpoint that was saved without what the format holds, `DiskFull` saying how much is missing, and
    `TransferError`.
    """
    write = FORMATS.get(to)
    if write is None:
        raise ConfigError(f"to={to!r}: give one of {', '.join(FORMATS)}")
    folder, target = Path(checkpoint).resolve(), Path(target)
    require_absent(target)
    manifest = read_manifest(folder)
    meter = _Meter(saved_nbytes(folder, manifest), on_progress)
    verify_files(folder, manifest, meter.add)
    return write(CheckpointSource(folder, manifest), target, meter)


class _Meter:
    """Counts bytes done out of a total that may grow."""

    def __init__(self, total: int, on_progress: OnProgress) -> None:
        self._done, self._total, self._on_progress = 0, total, on_progress

    def expect(self, nbytes: int) -> None:
        self._total += nbytes

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._on_progress(self._done, self._total)


def _write_torch(source: CheckpointSource, target: Path, meter: _Meter) -> Exported:
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
    return Exported(target, nbytes, _without_weights(source, fp32_weights))


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
                state[number] = {"step": _scalar(parameter.step), **source.moments(parameter)}
        groups.append({**group.hyperparameters, "param_names": group.names, "params": list(numbers)})
    return {"state": state, "param_groups": groups}


def _scalar(value: int) -> StreamedTensor:
    return StreamedTensor(torch.float32, (), lambda start, stop: torch.tensor([float(value)]))


def _without_weights(source: CheckpointSource, fp32_weights: dict[str, StreamedTensor]) -> tuple[str, ...]:
    return tuple(p.name for p in source.optimizer.parameters if p.name not in fp32_weights)


FORMATS: dict[str, Callable[[CheckpointSource, Path, _Meter], Exported]] = {"torch": _write_torch}
