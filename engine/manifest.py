"""The manifest of a checkpoint: versioned JSON that says what every byte beside it is. See docs/formats.md.

A manifest is somebody else's input: it is checked in full before anything that it names is opened.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import torch
import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tierstep.errors import CheckpointCorrupt, CheckpointMismatch
from tierstep.io.durable import write_durably

FORMAT = "tierstep-checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT_BYTES = 1 << 30
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.bfloat16, torch.float16, torch.float32)}


def _inside(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        raise ValueError("a file must lie inside the checkpoint")
    os.fsencode(path)  # a ValueError for what no file can be called
    return path


FileName = Annotated[str, AfterValidator(_inside)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, le=1 << 60)]
DtypeName = Literal["bfloat16", "float16", "float32"]  # of weights


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SavedParameter(_Strict):
    """A trainable parameter: identity, shape, and how many updates it has seen."""

    name: str
    shape: list[Count]
    dtype: DtypeName
    group: Count
    step: Count


class SavedSlice(_Strict):
    """Elements `start` to `stop` of a parameter's flat order, at element `offset` of the record's fields."""

    parameter: Count
    start: Count
    stop: Count
    offset: Count


class SavedRecord(_Strict):
    """One subgroup's record. `file` is None for a record of zeros, which takes no file."""

    file: FileName | None
    nbytes: Count
    checksum: Checksum | None
    dtype: DtypeName
    numel: Count
    slices: list[SavedSlice]


class SavedTensors(_Strict):
    """A safetensors file, the checksum of each tensor in it, and that of its header (None in older checkpoints)."""

    file: FileName
    checksums: dict[str, Checksum]
    header: Checksum | None = None


class SavedOptimizer(_Strict):
    """Hyperparameters of the groups, and all parameters and records."""

    groups: list[dict[str, Any]]
    parameters: list[SavedParameter]
    records: list[SavedRecord]

    @model_validator(mode="after")
    def _every_element_is_saved_once(self) -> SavedOptimizer:
        saved: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(self.parameters))}
        for record in self.records:
            for part in record.slices:
                if part.parameter not in saved or self.parameters[part.parameter].dtype != record.dtype:
                    raise ValueError("a slice names a parameter that is not there, or one of another dtype")
                saved[part.parameter].append((part.start, part.stop))
            places = sorted((part.offset, part.offset + part.stop - part.start) for part in record.slices)
            if not _cover(places, record.numel):
                raise ValueError("the slices of a record do not fill it once and in full")
        if len({parameter.name for parameter in self.parameters}) < len(self.parameters):
            raise ValueError("two parameters have one name")
        for index, parameter in enumerate(self.parameters):
            if not _cover(sorted(saved[index]), math.prod(parameter.shape)):
                raise ValueError(f"the slices of {parameter.name} do not cover it once and in full")
        return self


def _cover(slices: list[tuple[int, int]], numel: int) -> bool:
    reached = 0
    for start, stop in slices:
        if start != reached or stop <= start:
            return False
        reached = stop
    return reached == numel


class Manifest(_Strict):
    """Everything about one checkpoint. `sequence` counts saves into a directory, whatever the clock says."""

    format: Literal["tierstep-checkpoint"]
    version: Literal[1]
    written_by: str
    step: Count
    sequence: Count
    optimizer: SavedOptimizer | None
    model: SavedTensors | None
    tied: dict[str, str]
    tensors: SavedTensors | None
    rng: dict[str, Any]
    states: dict[str, Any] = Field(default_factory=dict)
    extra: dict[str, Any]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Commit a manifest: durable and whole, or not there at all. Blocks."""
    body = manifest.model_dump()
    document = {**body, "checksum": _checksum(body)}
    write_durably(folder / MANIFEST_NAME, json.dumps(document, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest. Blocks.

    Raises `CheckpointCorrupt` when it is damaged, `CheckpointMismatch` for a format that this version cannot read.
    """
    path = folder / MANIFEST_NAME
    document = _load(path)
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise CheckpointMismatch(
            f"{path} is format {document.get('format')!r} version {document.get('version')!r}; "
            f"this version reads {FORMAT!r} version {VERSION}"
        )
    checksum = document.pop("checksum", None)
    try:
        if checksum != _checksum(document):
            raise CheckpointCorrupt(f"{path} is damaged (its checksum does not fit): restore another checkpoint")
        return Manifest.model_validate(document)
    except (ValidationError, RecursionError) as error:
        detail = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "too deeply nested"}
        where = ".".join(str(part) for part in detail["loc"])
        raise CheckpointCorrupt(f"{path} is not a valid manifest: {where}: {detail['msg']}") from error


def _load(path: Path) -> dict[str, Any]:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointCorrupt(f"{path} is no regular file: it is not one of tierstep's")
        if status.st_size > MANIFEST_LIMIT_BYTES:
            raise CheckpointCorrupt(f"{path} is larger than any manifest: it is not one of tierstep's")
        document = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{path.parent} is no complete checkpoint: it has no {MANIFEST_NAME}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read ({error}): restore another checkpoint") from error
    if not isinstance(document, dict):
        raise CheckpointCorrupt(f"{path} is not a manifest: it is no JSON object")
    return document


def _checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
