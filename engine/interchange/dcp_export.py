"""A checkpoint in the format of PyTorch Distributed Checkpoint, written box by box.

Such a folder holds one file of `torch.save` outcomes one after the other, and `.metadata`, which says of every tensor
which box of it lies where. torch's own writer keeps a reference to every tensor until the end, so writing is done here.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # part of the format: its name is in every .metadata
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tierstep.engine.interchange.source import PIECE_ELEMENTS, CheckpointSource, StreamedTensor
from tierstep.engine.interchange.torch_export import scalar
from tierstep.engine.interchange.transfer import Exported, Meter
from tierstep.io.drafts import new_folder

DATA_FILE, METADATA_FILE, FORMAT_VERSION = "__0_0.distcp", ".metadata", "1.0.0"
ENTRY_BYTES = 4096  # what `torch.save` adds to a value at most

Keys = tuple[str | int, ...]  # the way to a value in the nested state dict


def export_dcp(source: CheckpointSource, target: Path, meter: Meter) -> Exported:
    """Write weights, state and groups into a new folder. Blocks; see `export_checkpoint`."""
    tensors, values = _contents(source)
    boxes = sum(1 for tensor in tensors.values() for _ in _boxes(tensor.shape, PIECE_ELEMENTS))
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    meter.expect(nbytes)
    with new_folder(target, nbytes + ENTRY_BYTES * (boxes + len(values))) as folder:
        with (folder / DATA_FILE).open("xb") as file:
            writer = _Writer(file, meter)
            for path, tensor in tensors.items():
                writer.add_tensor(path, tensor)
            for path, value in values.items():
                writer.add_value(path, value)
            nbytes = file.tell()
        for name, owner in source.tied.items():
            writer.add_alias(("model", name), ("model", owner))
        (folder / METADATA_FILE).write_bytes(pickle.dumps(writer.metadata()))
    return Exported(target, nbytes, source.without_weights() if source.has_optimizer else ())


def _contents(source: CheckpointSource) -> tuple[dict[Keys, StreamedTensor], dict[Keys, Any]]:
    """Return what the nested state dict holds: tensors, and other values."""
    tensors: dict[Keys, StreamedTensor] = {}
    values: dict[Keys, Any] = {}
    if source.has_weights:
        tensors |= {("model", name): tensor for name, tensor in source.weights().items()}
    if not source.has_optimizer:
        return tensors, values
    tensors |= {("fp32_weights", name): tensor for name, tensor in source.fp32_weights().items()}
    for parameter in source.optimizer.parameters:
        entry = {"step": scalar(parameter.step), **source.moments(parameter)}
        tensors |= {("optimizer", "state", parameter.name, key): tensor for key, tensor in entry.items()}
    for index, group in enumerate(source.groups()):
        settings = {**group.hyperparameters, "param_names": group.names, "params": group.names}
        values |= {("optimizer", "param_groups", index, key): value for key, value in settings.items()}
    return tensors, values


@dataclass
class _Writer:
    file: BinaryIO
    meter: Meter
    kinds: dict[str, STORAGE_TYPES] = field(default_factory=dict)
    paths: dict[str, Keys] = field(default_factory=dict)
    places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)

    def add_tensor(self, path: Keys, tensor: StreamedTensor) -> None:
        name = self._name(path)
        chunks: list[ChunkStorageMetadata] = []
        for offsets, sizes in _boxes(tensor.shape, PIECE_ELEMENTS):
            start = sum(offset * math.prod(tensor.shape[axis + 1 :]) for axis, offset in enumerate(offsets))
            box = tensor.read(start, start + math.prod(sizes)).view(sizes)
            self.places[MetadataIndex(name, offsets, len(chunks))] = self._append(box)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            self.meter.add(box.numel() * box.element_size())
        self.kinds[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)

    def add_value(self, path: Keys, value: object) -> None:
        name = self._name(path)
        self.places[MetadataIndex(name)] = self._append(value)
        self.kinds[name] = BytesStorageMetadata()

    def add_alias(self, path: Keys, owner: Keys) -> None:
        """Give a tensor that was written a second name."""
        name, same = self._name(path), ".".join(map(str, owner))
        if same in self.kinds:
            self.kinds[name] = self.kinds[same]
            found = {index: place for index, place in self.places.items() if index.fqn == same}
            self.places |= {MetadataIndex(name, index.offset, index.index): place for index, place in found.items()}

    def metadata(self) -> Metadata:
        return Metadata(self.kinds, planner_data=self.paths, storage_data=self.places, version=FORMAT_VERSION)

    def _name(self, path: Keys) -> str:
        name = ".".join(map(str, path))
        self.paths[name] = path
        return name

    def _append(self, value: object) -> _StorageInfo:
        offset = self.file.tell()
        parts = _Parts()  # in memory first: torch hides what goes wrong with a file, such as a full drive
        torch.save(value, cast(BinaryIO, parts))
        for part in parts:
            self.file.write(part)
        return _StorageInfo(DATA_FILE, offset, self.file.tell() - offset)


class _Parts(list[bytes]):
    """What is written to it, part by part."""

    def write(self, part: bytes) -> int:
        self.append(bytes(part))
        return len(part)

    def flush(self) -> None:
        """Nothing is held back."""


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, sizes) of boxes that cover a tensor, each contiguous in it and of at most `limit` elements."""
    if not shape or math.prod(shape) <= limit:
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:])
    if row > limit:
        for index in range(shape[0]):
            for offsets, sizes in _boxes(shape[1:], limit):
                yield (index, *offsets), (1, *sizes)
        return
    rows = limit // row
    for first in range(0, shape[0], rows):
        yield (first,) + (0,) * len(shape[1:]), (min(rows, shape[0] - first), *shape[1:])
