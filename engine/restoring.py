"""Reading a checkpoint: everything is verified first, then matched, and only then is anything changed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.extras import decode
from tierstep.engine.manifest import DTYPES, Manifest, SavedOptimizer, SavedRecord, SavedSlice, SavedTensors
from tierstep.engine.optimizer import AdamW
from tierstep.engine.rng import rng_states, set_rng_states
from tierstep.engine.state_dict import checked_group
from tierstep.engine.tensor_file import read_tensors
from tierstep.engine.training_state import TrainingState
from tierstep.errors import CheckpointCorrupt, CheckpointMismatch
from tierstep.io.failures import named_failures
from tierstep.tiers.record import RecordLayout, bytes_of

READ_BYTES = 8 << 20
MALFORMED = (TypeError, KeyError, ValueError, IndexError, AttributeError, RuntimeError)  # what odd values end in


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Read every byte that a manifest names. Raises `CheckpointCorrupt` naming file and parameters. Blocks."""
    for record in _records_with_files(manifest):
        _verify_record(folder, record, manifest)
    for part in (manifest.model, manifest.tensors):
        if part is not None:
            _read_tensors(folder, part)


def restore_into(
    folder: Path, manifest: Manifest, model: torch.nn.Module | None, optimizer: AdamW | None
) -> dict[str, Any]:
    """Verify, match, then take over weights, state, step counts, groups and random states; return the extras. Blocks.

    Raises `CheckpointCorrupt` or `CheckpointMismatch` before anything is changed.
    """
    tensors = {} if manifest.tensors is None else _read_tensors(folder, manifest.tensors)
    weights = _matched_weights(folder, manifest, model)
    if optimizer is not None:
        optimizer.adopt_unfrozen()
        saved = _matched_optimizer(manifest, optimizer)
        groups = _checked_groups(folder, saved, optimizer)
        for record in _records_with_files(manifest):
            _verify_record(folder, record, manifest)
    extra = _decoded(folder, manifest.extra, tensors)
    _set_rng(folder, _decoded(folder, manifest.rng, tensors))
    for target, source in weights:
        target.copy_(source)
    if optimizer is not None:
        _take_over(folder, saved, groups, optimizer)
    return extra


def _decoded(folder: Path, value: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    try:
        found = decode(value, tensors)
    except MALFORMED as error:
        raise CheckpointCorrupt(f"{folder} holds values that no save wrote ({error!r})") from error
    if not isinstance(found, dict):
        raise CheckpointCorrupt(f"{folder} holds a {type(found).__name__} where a save wrote a dict")
    return found


def _set_rng(folder: Path, states: dict[str, Any]) -> None:
    """Set the random states first of all, because that tells whether they are sound; undo it if they are not."""
    before = rng_states()
    try:
        set_rng_states(states)
    except MALFORMED as error:
        set_rng_states(before)
        raise CheckpointCorrupt(f"{folder} holds random states that no save wrote ({error!r})") from error


def _checked_groups(folder: Path, saved: SavedOptimizer, optimizer: AdamW) -> list[dict[str, Any]]:
    pairs = zip(optimizer.param_groups, saved.groups, strict=True)
    return [checked_group(group, _decoded(folder, found, {})) for group, found in pairs]


# ---- verifying


def _records_with_files(manifest: Manifest) -> Iterator[SavedRecord]:
    if manifest.optimizer is not None:
        yield from (record for record in manifest.optimizer.records if record.file is not None)


def _verify_record(folder: Path, record: SavedRecord, manifest: Manifest) -> None:
    path = _regular_file(folder, str(record.file))
    layout = _layout(record)
    digest, nbytes = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
                nbytes += len(block)
    except OSError as error:
        raise CheckpointCorrupt(f"{_holder(record, path, manifest)} cannot be read: {error}") from error
    if nbytes != record.nbytes or nbytes < layout.nbytes:
        raise CheckpointCorrupt(f"{_holder(record, path, manifest)} has {nbytes} bytes instead of {record.nbytes}")
    if digest.hexdigest() != record.checksum:
        raise CheckpointCorrupt(f"{_holder(record, path, manifest)} is damaged: restore another checkpoint")


def _regular_file(folder: Path, name: str) -> Path:
    path = folder / name
    if any(part.is_symlink() for part in (path, *path.parents) if folder in part.parents):
        raise CheckpointCorrupt(f"{path} is a symbolic link, which no checkpoint of tierstep holds")
    return path


def _holder(record: SavedRecord, path: Path, manifest: Manifest) -> str:
    parameters = manifest.optimizer.parameters if manifest.optimizer else []
    names = [parameters[part.parameter].name for part in record.slices]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{path}, which holds the state of {', '.join(names[:3])}{more},"


def _read_tensors(folder: Path, part: SavedTensors) -> dict[str, torch.Tensor]:
    return read_tensors(_regular_file(folder, part.file), part.checksums)


def _layout(record: SavedRecord) -> RecordLayout:
    return RecordLayout(record.numel, record_fields(DTYPES[record.dtype]))


# ---- matching


def _matched_weights(
    folder: Path, manifest: Manifest, model: torch.nn.Module | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (tensor of the model, saved tensor) for every entry of the model's state dict."""
    if model is None:
        return []
    if manifest.model is None:
        raise CheckpointMismatch(f"{folder} holds no model: it was saved without one")
    saved = _read_tensors(folder, manifest.model)
    saved.update({name: saved[owner] for name, owner in manifest.tied.items() if owner in saved})
    present = model.state_dict()
    _require_same_names("the model's tensors", set(present), set(saved), folder)
    for name, tensor in present.items():
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise CheckpointMismatch(f"{name} of the model is an expanded view, which cannot be written: clone it")
        if (tensor.shape, tensor.dtype) != (saved[name].shape, saved[name].dtype):
            raise CheckpointMismatch(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the model but {saved[name].dtype} "
                f"{tuple(saved[name].shape)} in {folder}: this is a checkpoint of another model"
            )
    return [(tensor.detach(), saved[name]) for name, tensor in present.items()]


def _matched_optimizer(manifest: Manifest, optimizer: AdamW) -> SavedOptimizer:
    saved = manifest.optimizer
    if saved is None:
        raise CheckpointMismatch("the checkpoint holds no optimizer: it was saved without one")
    shards = {shard.name: shard for shard in optimizer.training_state.shards}
    parameters = {parameter.name: parameter for parameter in saved.parameters}
    _require_same_names("the trained parameters", set(shards), set(parameters), "the checkpoint")
    for name, shard in shards.items():
        have = (list(shard.parameter.shape), shard.parameter.dtype, shard.group)
        want = (parameters[name].shape, DTYPES[parameters[name].dtype], parameters[name].group)
        if have != want:
            raise CheckpointMismatch(
                f"{name} is {have[1]} {have[0]} in group {have[2]} of the optimizer but {want[1]} {want[0]} in group "
                f"{want[2]} of the checkpoint: this is a checkpoint of another model"
            )
    if len(saved.groups) != len(optimizer.param_groups):
        raise CheckpointMismatch(
            f"the checkpoint has {len(saved.groups)} param groups, the optimizer {len(optimizer.param_groups)}"
        )
    return saved


def _require_same_names(what: str, present: set[str], saved: set[str], where: object) -> None:
    if present != saved:
        only_present, only_saved = sorted(present - saved)[:3], sorted(saved - present)[:3]
        raise CheckpointMismatch(
            f"{what} differ from those in {where} (only here: {only_present}, only there: {only_saved}): "
            f"this is a checkpoint of another model, or other parameters are frozen"
        )


# ---- taking over


def _take_over(folder: Path, saved: SavedOptimizer, groups: Sequence[Mapping[str, Any]], optimizer: AdamW) -> None:
    state = optimizer.training_state
    source = _Source(folder, saved)

    def take_file(index: int) -> bool:
        """Use a saved file as it is, where it was cut and will be placed as this record is."""
        record = source.same_as(state, index)
        if record is None:
            return False
        if record.file is None or record.checksum is None:
            state.store.reset(index)
            return True
        return state.store.adopt(index, folder / record.file, record.checksum)

    def fill(index: int, fields: dict[str, torch.Tensor]) -> None:
        for part in state.subgroups[index].slices:
            source.copy_into(state.shards[part.shard].name, part.start, part.stop, part.offset, fields)

    def replace() -> None:
        state.rewrite(fill, unless=take_file)
        steps = {parameter.name: parameter.step for parameter in saved.parameters}
        state.steps[:] = [steps[shard.name] for shard in state.shards]
        for group, hyperparameters in zip(optimizer.param_groups, groups, strict=True):
            group.update(hyperparameters)

    optimizer.stepper.replace_state(replace)


@dataclass(frozen=True)
class _Where:
    record: SavedRecord
    part: SavedSlice


class _Source:
    """Saved fields by parameter name and element range, however the checkpoint was cut into subgroups."""

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
        path, layout = self._folder / record.file, _layout(record)
        with named_failures(f"reading {path}", path), path.open("rb", buffering=0) as file:
            for name, values in fields.items():
                _read_fully(
                    file.fileno(), bytes_of(values), layout.offsets[name] + element * values.element_size(), path
                )


def _read_fully(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    while target.nbytes:
        moved = os.preadv(descriptor, [target], offset)
        if not moved:
            raise CheckpointCorrupt(f"{path} became shorter while it was read: restore another checkpoint")
        target, offset = target[moved:], offset + moved
