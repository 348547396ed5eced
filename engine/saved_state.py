"""What a checkpoint holds of the optimizer, by parameter name and element range, however it was cut into subgroups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.manifest import DTYPES, SavedOptimizer, SavedRecord, SavedSlice
from tierstep.engine.training_state import TrainingState
from tierstep.errors import CheckpointCorrupt
from tierstep.io.failures import named_failures
from tierstep.tiers.record import RecordLayout, bytes_of


@dataclass(frozen=True)
class _Where:
    record: SavedRecord
    part: SavedSlice


class SavedState:
    """The records in a checkpoint's folder. Nothing is read before it is asked for, and nothing is kept."""

    def __init__(self, folder: Path, saved: SavedOptimizer) -> None:
        self._folder = folder
        self._names = [parameter.name for parameter in saved.parameters]
        self._parts: dict[str, list[_Where]] = {}
        for record in saved.records:
            for part in record.slices:
                self._parts.setdefault(self._names[part.parameter], []).append(_Where(record, part))

    def same_as(self, state: TrainingState, index: int) -> SavedRecord | None:
        """Return the saved record that holds exactly the elements of a subgroup, at the same places."""
        slices = state.subgroups[index].slices
        wanted = [(state.shards[part.shard].name, part.start, part.stop, part.offset) for part in slices]
        first = self._parts.get(wanted[0][0], [])
        record = next((where.record for where in first if where.part.start == wanted[0][1]), None)
        if record is None or (record.file and record.nbytes != state.subgroups[index].layout.padded_nbytes):
            return None
        found = [(self._names[part.parameter], part.start, part.stop, part.offset) for part in record.slices]
        return record if found == wanted and record.numel == state.subgroups[index].numel else None

    def copy_into(self, name: str, start: int, stop: int, offset: int, fields: Mapping[str, torch.Tensor]) -> None:
        """Fill elements `offset` on of each field with the saved elements `start` to `stop` of a parameter."""
        for where in self._parts.get(name, []):
            first, last = max(start, where.part.start), min(stop, where.part.stop)
            if first < last:
                begin = offset + first - start
                here = {field: values[begin : begin + last - first] for field, values in fields.items()}
                self._read(where.record, where.part.offset + first - where.part.start, here)

    def _read(self, record: SavedRecord, element: int, fields: Mapping[str, torch.Tensor]) -> None:
        if record.file is None:
            for values in fields.values():
                values.zero_()
            return
        path, layout = self._folder / record.file, layout_of(record)
        for name, values in fields.items():
            read_into(path, layout.offsets[name] + element * values.element_size(), values)


def layout_of(record: SavedRecord) -> RecordLayout:
    """Return where the fields of a saved record lie in its file."""
    return RecordLayout(record.numel, record_fields(DTYPES[record.dtype]))


def read_into(path: Path, offset: int, values: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor with the bytes of a file from `offset` on. Blocks.

    Raises `CheckpointCorrupt` when the file ends before, `TransferError` when it cannot be read.
    """
    target = bytes_of(values)
    with named_failures(f"reading {path}", path), path.open("rb", buffering=0) as file:
        while target.nbytes:
            moved = os.preadv(file.fileno(), [target], offset)
            if not moved:
                raise CheckpointCorrupt(f"{path} became shorter while it was read: restore another checkpoint")
            target, offset = target[moved:], offset + moved
