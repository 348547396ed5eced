"""A checkpoint as a set of tensors that are read piece by piece: what every export format is written from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.adamw.reference import load_master
from tierstep.engine.manifest import DTYPES, Manifest, SavedOptimizer, SavedParameter
from tierstep.engine.restoring import decoded
from tierstep.engine.saved_state import SavedState
from tierstep.engine.tensor_index import TensorPlace, index_tensors
from tierstep.errors import CheckpointMismatch

PIECE_ELEMENTS = 1 << 22
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class StreamedTensor:
    """A tensor that is not in memory: `read(start, stop)` returns those elements of its flat order, 1-D, on the CPU."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield all elements in order, at most `PIECE_ELEMENTS` at a time. Blocks."""
        for start in range(0, self.numel, PIECE_ELEMENTS):
            yield self.read(start, min(self.numel, start + PIECE_ELEMENTS))


@dataclass(frozen=True)
class ParamGroup:
    """A param group: its hyperparameters, and the names of all its parameters, frozen ones too where they are known."""

    hyperparameters: dict[str, Any]
    names: list[str]


class CheckpointSource:
    """The tensors of a checkpoint, by name. Reads nothing but headers before a piece is asked for, and keeps nothing.

    Raises `CheckpointMismatch` where the checkpoint lacks what an export needs.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.step = manifest.step
        self._places = {} if manifest.model is None else index_tensors(folder / manifest.model.file)
        self._optimizer = manifest.optimizer
        self._state = None if manifest.optimizer is None else SavedState(folder, manifest.optimizer)
        self.tied = manifest.tied

    @property
    def has_weights(self) -> bool:
        """Whether the checkpoint was saved with its model."""
        return bool(self._places)

    @property
    def has_optimizer(self) -> bool:
        """Whether the checkpoint was saved with its optimizer."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> SavedOptimizer:
        """The manifest's description of the optimizer."""
        if self._optimizer is None:
            raise CheckpointMismatch(f"{self.folder} holds no optimizer: it was saved without one")
        return self._optimizer

    def weights(self) -> dict[str, StreamedTensor]:
        """Return weights and buffers of the model, without names that are tied to another."""
        if not self.has_weights:
            raise CheckpointMismatch(f"{self.folder} holds no model: it was saved without one")
        return {name: StreamedTensor(place.dtype, place.shape, place.read) for name, place in self._places.items()}

    def groups(self) -> list[ParamGroup]:
        """Return the param groups, with every setting that torch's AdamW has."""
        defaults = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
        found = []
        for index, group in enumerate(self.optimizer.groups):
            saved = decoded(self.folder, group, {})
            names = [str(name) for name in saved.pop("param_names", ())]  # none in checkpoints of before 2026-12-07
            names += [p.name for p in self.optimizer.parameters if p.group == index and p.name not in set(names)]
            settings = {key: value for key, value in defaults.items() if key != "params"} | saved
            found.append(ParamGroup(settings, names))
        return found

    def moments(self, parameter: SavedParameter) -> dict[str, StreamedTensor]:
        """Return exp_avg and exp_avg_sq of a parameter, fp32."""
        shape = tuple(parameter.shape)
        return {name: StreamedTensor(torch.float32, shape, self._reader(parameter, name)) for name in MOMENTS}

    def fp32_weights(self) -> dict[str, StreamedTensor]:
        """Return the exact fp32 weights of those trained parameters whose weights are in the checkpoint."""
        found = {}
        for parameter in self.optimizer.parameters:
            place = self._place_of(parameter)
            if place is not None:
                found[parameter.name] = StreamedTensor(torch.float32, place.shape, self._joiner(parameter, place))
        return found

    def without_weights(self) -> tuple[str, ...]:
        """Return the names of the trained parameters whose weights are not in the checkpoint."""
        return tuple(parameter.name for parameter in self.optimizer.parameters if self._place_of(parameter) is None)

    def _place_of(self, parameter: SavedParameter) -> TensorPlace | None:
        place = self._places.get(self.tied.get(parameter.name, parameter.name))
        fits = place is not None and (place.dtype, list(place.shape)) == (DTYPES[parameter.dtype], parameter.shape)
        return place if fits else None

    def _reader(self, parameter: SavedParameter, field: str) -> Callable[[int, int], torch.Tensor]:
        dtype = dict(record_fields(DTYPES[parameter.dtype]))[field]

        def read(start: int, stop: int) -> torch.Tensor:
            values = torch.empty(stop - start, dtype=dtype)
            if self._state is not None:
                self._state.copy_into(parameter.name, start, stop, 0, {field: values})
            return values

        return read

    def _joiner(self, parameter: SavedParameter, place: TensorPlace) -> Callable[[int, int], torch.Tensor]:
        fields = [name for name, _ in record_fields(place.dtype) if name not in MOMENTS]
        readers = {name: self._reader(parameter, name) for name in fields}

        def read(start: int, stop: int) -> torch.Tensor:
            return load_master(place.read(start, stop), _read_all(readers, start, stop))

        return read


def _read_all(readers: Mapping[str, Callable[[int, int], torch.Tensor]], start: int, stop: int) -> dict[str, Any]:
    return {name: read(start, stop) for name, read in readers.items()}
