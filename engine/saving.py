"""Writing the parts of a checkpoint into a folder: records, tensors, manifest. See docs/formats.md for the order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstep import version
from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.contents import Contents
from tierstep.engine.extras import encode
from tierstep.engine.manifest import (
    DTYPES,
    Manifest,
    SavedOptimizer,
    SavedParameter,
    SavedRecord,
    SavedSlice,
    SavedTensors,
    write_manifest,
)
from tierstep.engine.optimizer import AdamW
from tierstep.engine.shards import parameter_names
from tierstep.engine.subgroups import Subgroup
from tierstep.engine.tensor_file import header_checksum, write_tensors
from tierstep.engine.training_state import TrainingState
from tierstep.errors import DiskFull
from tierstep.io.backend import IoBackend
from tierstep.io.durable import fsync_directory, fsync_file
from tierstep.io.failures import free_bytes
from tierstep.io.requests import Write
from tierstep.tiers.freeze import Freeze
from tierstep.tiers.record import RecordLayout, checksum_of

MODEL_FILE, TENSORS_FILE, RECORDS_FOLDER = "model.safetensors", "tensors.safetensors", "records"


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint will hold, as it was at one moment, with nothing of it written yet.

    `linked` are the checksums of the records whose files have been linked, `frozen` hands out the others. `optimizer`
    lacks the checksums of records, which are known when these have been copied. `written_nbytes` is what will be
    written, without the manifest.
    """

    step: int
    sequence: int
    contents: Contents
    optimizer: SavedOptimizer | None
    linked: dict[int, str]
    frozen: Freeze | None
    written_nbytes: int


def take_snapshot(folder: Path, numbers: tuple[int, int], contents: Contents, optimizer: AdamW | None) -> Snapshot:
    """Collect what is to be saved under `numbers` (step, sequence) into `folder`, and link what lies in files there.

    Blocks for a copy of the weights in memory. Raises `DiskFull` when there is no room for what will be written;
    nothing but links is in `folder` yet.
    """
    (folder / RECORDS_FOLDER).mkdir()
    state = None if optimizer is None else optimizer.training_state
    linked = {} if state is None else _link_records(folder, state)
    to_copy = {} if state is None else _records_to_copy(state, linked)
    in_new_files = 0 if state is None else sum(state.subgroups[index].layout.padded_nbytes for index in linked)
    written = sum(to_copy.values()) + contents.nbytes
    _require_space(folder, written, in_new_files)
    return Snapshot(
        *numbers,
        contents=contents.copied(),
        optimizer=None if optimizer is None else _describe_optimizer(optimizer),
        linked=linked,
        written_nbytes=written,
        frozen=None if state is None else state.store.freeze(list(to_copy)),  # last: it waits for its consumer
    )


def write_checkpoint(folder: Path, snapshot: Snapshot, backend: IoBackend) -> None:
    """Write a snapshot into its folder; the manifest comes last, when all else is durable. Blocks; on any thread."""
    contents, checksums = snapshot.contents, dict(snapshot.linked)
    if snapshot.frozen is not None and snapshot.optimizer is not None:
        checksums |= _copy_records(folder, snapshot.frozen, snapshot.optimizer, backend)
    for index in checksums:
        fsync_file(folder / _record_file(index))
    fsync_directory(folder / RECORDS_FOLDER)
    manifest = Manifest(
        format="tierstep-checkpoint",
        version=1,
        written_by=version.__version__,
        step=snapshot.step,
        sequence=snapshot.sequence,
        optimizer=None if snapshot.optimizer is None else _with_files(snapshot.optimizer, checksums),
        model=None if contents.weights is None else _write_tensors(folder, MODEL_FILE, contents.weights),
        tied=contents.tied,
        tensors=_write_tensors(folder, TENSORS_FILE, contents.tensors) if contents.tensors else None,
        rng=contents.rng,
        states=contents.states,
        extra=contents.extra,
    )
    write_manifest(folder, manifest)


def _require_space(folder: Path, written: int, in_new_files: int) -> None:
    """Raise `DiskFull`, with the numbers, when the file system of `folder` has no room.

    Linked records need none now, but the next step will store them into new files beside the linked ones.
    """
    free, needed = free_bytes(folder), written + in_new_files
    if free < needed:
        raise DiskFull(
            f"a checkpoint does not fit into {folder}: it writes {written} bytes, and training on takes another "
            f"{in_new_files} beside the files that it links, but {free} are free and {needed - free} are missing; "
            f"free some space or lower keep",
            path=folder,
        )


def _write_tensors(folder: Path, file: str, tensors: Mapping[str, torch.Tensor]) -> SavedTensors:
    checksums = write_tensors(folder / file, tensors)
    return SavedTensors(file=file, checksums=checksums, header=header_checksum(tensors))


def _describe_optimizer(optimizer: AdamW) -> SavedOptimizer:
    state = optimizer.training_state
    names = ("lr", "betas", "eps", "weight_decay", "maximize")
    groups = [
        {k: v for k, v in group.items() if k in names or isinstance(v, (int, float, str, bool))}
        for group in optimizer.param_groups
    ]
    for group, all_names in zip(groups, parameter_names(optimizer.param_groups), strict=True):
        group["param_names"] = all_names  # frozen ones too: torch's state dicts count them
    return SavedOptimizer(
        groups=[encode(_plain(group), {}, f"param_groups.{i}") for i, group in enumerate(groups)],
        parameters=[
            SavedParameter(
                name=shard.name,
                shape=list(shard.parameter.shape),
                dtype=_dtype_name(shard.parameter.dtype),
                group=shard.group,
                step=step,
            )
            for shard, step in zip(state.shards, state.steps, strict=True)
        ],
        records=[_describe_record(state, subgroup) for subgroup in state.subgroups],
    )


def _with_files(optimizer: SavedOptimizer, checksums: Mapping[int, str]) -> SavedOptimizer:
    """Add what became known when the records' files were there."""
    records = [
        record
        if index not in checksums
        else record.model_copy(
            update={"file": _record_file(index), "nbytes": _file_nbytes(record), "checksum": checksums[index]}
        )
        for index, record in enumerate(optimizer.records)
    ]
    return optimizer.model_copy(update={"records": records})


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with numbers in place of one-element tensors."""

    def number(value: Any) -> Any:  # noqa: ANN401
        return float(value) if isinstance(value, torch.Tensor) else value

    return {k: tuple(map(number, v)) if isinstance(v, (tuple, list)) else number(v) for k, v in group.items()}


def _record_file(index: int) -> str:
    return f"{RECORDS_FOLDER}/{index:06d}.bin"


def _link_records(folder: Path, state: TrainingState) -> dict[int, str]:
    """Link what lies in files already; return the checksums by record."""
    found = ((index, state.store.link(index, folder / _record_file(index))) for index in range(len(state.subgroups)))
    return {index: checksum for index, checksum in found if checksum is not None}


def _records_to_copy(state: TrainingState, linked: Mapping[int, str]) -> dict[int, int]:
    """Return the bytes of what is not linked, by record; one that was never updated is all zero and takes no file."""
    return {
        index: subgroup.layout.padded_nbytes
        for index, subgroup in enumerate(state.subgroups)
        if index not in linked and not state.store.is_fresh(index)
    }


def _copy_records(folder: Path, frozen: Freeze, optimizer: SavedOptimizer, backend: IoBackend) -> dict[int, str]:
    """Write frozen records into files of the checkpoint; return the checksums by record."""
    checksums = {}
    for index, buffer in frozen.records():
        path, payload = folder / _record_file(index), buffer.memory[: _file_nbytes(optimizer.records[index])]
        checksums[index] = checksum_of(payload)
        backend.allocate(path, payload.nbytes)
        backend.submit(Write(path, 0, payload)).wait()
    return checksums


def _describe_record(state: TrainingState, subgroup: Subgroup) -> SavedRecord:
    """Describe a record that has no file yet."""
    dtype = state.shards[subgroup.slices[0].shard].parameter.dtype
    return SavedRecord(
        file=None,
        nbytes=0,
        checksum=None,
        dtype=_dtype_name(dtype),
        numel=subgroup.numel,
        slices=[
            SavedSlice(parameter=part.shard, start=part.start, stop=part.stop, offset=part.offset)
            for part in subgroup.slices
        ],
    )


def _file_nbytes(record: SavedRecord) -> int:
    return RecordLayout(record.numel, record_fields(DTYPES[record.dtype])).padded_nbytes


def _dtype_name(dtype: torch.dtype) -> Any:  # noqa: ANN401 - one of the manifest's literals
    return str(dtype).removeprefix("torch.")
