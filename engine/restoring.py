"""Reading a checkpoint: everything is verified first, then matched, and only then is anything changed."""

from __future__ import annotations

import difflib
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from tierstep.engine.extras import decode
from tierstep.engine.manifest import DTYPES, Manifest, SavedOptimizer, SavedRecord, SavedTensors
from tierstep.engine.optimizer import AdamW
from tierstep.engine.rng import rng_states, set_rng_states
from tierstep.engine.saved_state import SavedState, layout_of
from tierstep.engine.state_dict import checked_group
from tierstep.engine.stateful import Stateful, load_states, require_saved
from tierstep.engine.tensor_file import header_checksum_of, read_tensors
from tierstep.engine.tensor_index import verify_tensors
from tierstep.errors import CheckpointCorrupt, CheckpointMismatch

READ_BYTES = 8 << 20
SIMILAR_AMONG = 1000  # names of the other side that are compared, so that an error takes no minutes
# What odd values end in.
MALFORMED = (TypeError, KeyError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError)


def verify_files(folder: Path, manifest: Manifest, on_read: Callable[[int], None] = lambda nbytes: None) -> None:
    """Read every byte that a manifest names, a few MiB at a time. Blocks. Calls `on_read(nbytes)` after every piece.

    Raises `CheckpointCorrupt` naming file and tensors.
    """
    for record in _records_with_files(manifest):
        _verify_record(folder, record, manifest, on_read)
    for part in _tensor_files(manifest):
        with _sound_tensor_file(folder, part) as path:
            verify_tensors(path, part.checksums, on_read)


def saved_nbytes(folder: Path, manifest: Manifest) -> int:
    """Return about how many bytes `verify_files` reads."""
    files = [folder / part.file for part in _tensor_files(manifest)]
    tensors = sum(path.stat().st_size for path in files if path.is_file())
    return tensors + sum(record.nbytes for record in _records_with_files(manifest))


def restore_into(
    folder: Path,
    manifest: Manifest,
    model: torch.nn.Module | None,
    optimizer: AdamW | None,
    parts: Mapping[str, Stateful],
) -> dict[str, Any]:
    """Verify, match, then take over weights, state, step counts, groups, parts and random states. Blocks.

    Returns the extras. Raises `CheckpointCorrupt` or `CheckpointMismatch` before anything is changed.
    """
    tensors = {} if manifest.tensors is None else _read_tensors(folder, manifest.tensors)
    weights = _matched_weights(folder, manifest, model)
    if optimizer is not None:
        optimizer.adopt_unfrozen()
        saved = _matched_optimizer(manifest, optimizer)
        groups = _checked_groups(folder, saved, optimizer)
        for record in _records_with_files(manifest):
            _verify_record(folder, record, manifest, read=optimizer.verifies_restored)
    extra = decoded(folder, manifest.extra, tensors)
    states = decoded(folder, manifest.states, tensors)
    require_saved(parts, states, folder)
    random_states = decoded(folder, manifest.rng, tensors)
    with ExitStack() as undo:
        undo.callback(set_rng_states, rng_states())
        _set_rng(folder, random_states)
        load_states(parts, states, folder)
        undo.pop_all()
    for target, source in weights:
        target.copy_(source)
    if optimizer is not None:
        _take_over(folder, saved, groups, optimizer)
    set_rng_states(random_states)  # again, after whatever the parts have drawn
    return extra


def decoded(folder: Path, value: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what `encode` was given. Raises `CheckpointCorrupt` for values that no save of `folder` wrote."""
    try:
        found = decode(value, tensors)
    except MALFORMED as error:
        raise CheckpointCorrupt(f"{folder} holds values that no save wrote ({error!r})") from error
    if not isinstance(found, dict):
        raise CheckpointCorrupt(f"{folder} holds a {type(found).__name__} where a save wrote a dict")
    return found


def _set_rng(folder: Path, states: dict[str, Any]) -> None:
    """Set the random states, which tells whether they are sound."""
    try:
        set_rng_states(states)
    except MALFORMED as error:
        raise CheckpointCorrupt(f"{folder} holds random states that no save wrote ({error!r})") from error


def _checked_groups(folder: Path, saved: SavedOptimizer, optimizer: AdamW) -> list[dict[str, Any]]:
    pairs = zip(optimizer.param_groups, saved.groups, strict=True)
    return [checked_group(group, decoded(folder, found, {})) for group, found in pairs]


# ---- verifying


def _records_with_files(manifest: Manifest) -> Iterator[SavedRecord]:
    if manifest.optimizer is not None:
        yield from (record for record in manifest.optimizer.records if record.file is not None)


def _tensor_files(manifest: Manifest) -> list[SavedTensors]:
    return [part for part in (manifest.model, manifest.tensors) if part is not None]


def _verify_record(
    folder: Path,
    record: SavedRecord,
    manifest: Manifest,
    on_read: Callable[[int], None] = lambda nbytes: None,
    *,
    read: bool = True,
) -> None:
    """Raise `CheckpointCorrupt` when a file is missing, has another length, or, where it is `read`, other bytes."""
    holder = _holder(record, folder / str(record.file), manifest)
    try:
        path = _regular_file(folder, str(record.file))
        nbytes = path.stat().st_size
        if nbytes != record.nbytes or nbytes < layout_of(record).nbytes:
            raise CheckpointCorrupt(f"it has {nbytes} bytes instead of {record.nbytes}")
        checksum = _checksum_of_file(path, on_read) if read else record.checksum
    except (CheckpointCorrupt, OSError) as error:
        raise CheckpointCorrupt(f"{holder} cannot be read: {error}") from error
    if checksum != record.checksum:
        raise CheckpointCorrupt(f"{holder} is damaged: restore another checkpoint")


def _checksum_of_file(path: Path, on_read: Callable[[int], None]) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            on_read(len(block))
    return digest.hexdigest()


def _regular_file(folder: Path, name: str) -> Path:
    """Return the path of a file of a checkpoint; a pipe or a device would be read for ever."""
    path = folder / name
    try:
        if any(part.is_symlink() for part in (path, *path.parents) if folder in part.parents):
            raise CheckpointCorrupt(f"{path} is a symbolic link, which no checkpoint of tierstep holds")
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointCorrupt(f"{path} is no regular file")
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error
    return path


def _holder(record: SavedRecord, path: Path, manifest: Manifest) -> str:
    parameters = manifest.optimizer.parameters if manifest.optimizer else []
    names = [parameters[part.parameter].name for part in record.slices]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{path}, which holds the state of {', '.join(names[:3])}{more},"


def _read_tensors(folder: Path, part: SavedTensors) -> dict[str, torch.Tensor]:
    with _sound_tensor_file(folder, part) as path:
        return read_tensors(path, part.checksums)


@contextmanager
def _sound_tensor_file(folder: Path, part: SavedTensors) -> Iterator[Path]:
    """Yield a file of tensors whose header is the one that was written; name its tensors in every error."""
    names = list(part.checksums)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    try:
        path = _regular_file(folder, part.file)
        if part.header is not None and header_checksum_of(path) != part.header:
            raise CheckpointCorrupt(f"{path} is damaged in its header, which names tensors, dtypes and shapes")
        yield path
    except (CheckpointCorrupt, OSError) as error:
        raise CheckpointCorrupt(
            f"{error}; {folder / part.file} should hold {', '.join(names[:3])}{more}: restore another checkpoint"
        ) from error


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
        only_present, only_saved = sorted(present - saved), sorted(saved - present)
        raise CheckpointMismatch(
            f"{what} differ from those in {where} (only here: {_listed(only_present, only_saved)}; only there: "
            f"{_listed(only_saved, only_present)}): this is a checkpoint of another model, names were changed, or "
            f"other parameters are frozen"
        )


def _listed(names: Sequence[str], others: Sequence[str]) -> str:
    """Return the first few names, each with the most similar one of the other side where there is one."""
    listed = []
    for name in names[:3]:
        similar = difflib.get_close_matches(name, others[:SIMILAR_AMONG], 1)
        listed.append(f"{name} (the other side has {similar[0]})" if similar else name)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(listed) + more if listed else "none"


# ---- taking over


def _take_over(folder: Path, saved: SavedOptimizer, groups: Sequence[Mapping[str, Any]], optimizer: AdamW) -> None:
    state = optimizer.training_state
    source = SavedState(folder, saved)

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
