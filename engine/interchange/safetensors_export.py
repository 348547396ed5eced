"""A checkpoint as safetensors: weights as transformers' `from_pretrained` loads them, the optimizer's state beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from tierstep.engine.interchange.source import CheckpointSource, StreamedTensor
from tierstep.engine.interchange.transfer import Exported, Meter
from tierstep.engine.tensor_file import file_header
from tierstep.io.drafts import new_folder
from tierstep.tiers.record import bytes_of

WEIGHTS_FILE, OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"


def export_safetensors(source: CheckpointSource, target: Path, meter: Meter) -> Exported:
    """Write weights, and state if there is any, into a new folder. Blocks; see `export_checkpoint`."""
    weights = source.weights()
    files = {WEIGHTS_FILE: (weights, {"format": "pt"})}
    if source.has_optimizer:
        files[OPTIMIZER_FILE] = (_state(source), _metadata(source))
    headers = {name: _header(tensors, metadata) for name, (tensors, metadata) in files.items()}
    nbytes = sum(tensor.nbytes for tensors, _ in files.values() for tensor in tensors.values())
    meter.expect(nbytes)
    nbytes += sum(len(header) for header in headers.values())
    with new_folder(target, nbytes) as folder:
        for name, (tensors, _) in files.items():
            with (folder / name).open("xb") as file:
                _write(file, headers[name], tensors, meter.add)
    return Exported(target, nbytes, source.without_weights() if source.has_optimizer else ())


def _state(source: CheckpointSource) -> dict[str, StreamedTensor]:
    exact = source.fp32_weights()
    found: dict[str, StreamedTensor] = {}
    for parameter in source.optimizer.parameters:
        found |= {f"{parameter.name}.{field}": moment for field, moment in source.moments(parameter).items()}
        if parameter.name in exact and parameter.dtype != "float32":
            found[f"{parameter.name}.fp32_weight"] = exact[parameter.name]
    return found


def _metadata(source: CheckpointSource) -> dict[str, str]:
    groups = [{**group.hyperparameters, "params": group.names} for group in source.groups()]
    steps = {parameter.name: parameter.step for parameter in source.optimizer.parameters}
    return {"format": "pt", "param_groups": json.dumps(groups), "steps": json.dumps(steps)}


def _header(tensors: Mapping[str, StreamedTensor], metadata: Mapping[str, str]) -> bytes:
    return file_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)


def _write(
    file: BinaryIO, header: bytes, tensors: Mapping[str, StreamedTensor], on_write: Callable[[int], None]
) -> None:
    file.write(header)
    for tensor in tensors.values():
        for piece in tensor.pieces():
            file.write(bytes_of(piece))
            on_write(piece.numel() * piece.element_size())
