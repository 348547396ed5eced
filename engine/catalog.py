"""The checkpoints that lie in a directory: which there are, which is the newest, and how one goes away."""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from tierstep.engine.manifest import MANIFEST_NAME, Manifest, read_manifest
from tierstep.errors import CheckpointError
from tierstep.io.durable import fsync_directory

NAME = re.compile(r"step-(\d{8,})(\.\d+)?")
SAVING, DELETING = ".saving-", ".deleting-"
LOGGER = logging.getLogger("tierstep")


@dataclass(frozen=True)
class CheckpointInfo:
    """One complete checkpoint of a directory. `sequence` counts the saves into it."""

    path: Path
    step: int
    sequence: int
    nbytes: int


def describe(folder: Path, manifest: Manifest) -> CheckpointInfo:
    """Return what a checkpoint is, going by its manifest."""
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return CheckpointInfo(folder, manifest.step, manifest.sequence, nbytes)


def look(directory: Path) -> tuple[tuple[CheckpointInfo, ...], dict[Path, CheckpointError]]:
    """Return the sound checkpoints of a directory, oldest save first, and what is wrong with the others."""
    found, damaged = [], {}
    for folder in directory.iterdir() if directory.is_dir() else ():
        if not NAME.fullmatch(folder.name) or not (folder / MANIFEST_NAME).is_file():
            continue
        try:
            found.append(describe(folder, read_manifest(folder)))
        except (CheckpointError, FileNotFoundError) as error:
            if isinstance(error, CheckpointError) and folder.exists():  # else it was pruned a moment ago
                damaged[folder] = error
    return tuple(sorted(found, key=lambda info: info.sequence)), damaged


def list_sound(directory: Path) -> tuple[CheckpointInfo, ...]:
    """Return the sound checkpoints of a directory, oldest save first; log what is wrong with the others."""
    present, damaged = look(directory)
    for error in damaged.values():
        LOGGER.warning("%s", error)
    return present


def newest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint; raise if a damaged one may be newer, going by its name."""
    present, damaged = look(directory)
    for folder, error in damaged.items():
        name = NAME.fullmatch(folder.name)
        if not present or (name is not None and int(name[1]) >= present[-1].step):
            raise error
        LOGGER.warning("%s", error)
    return present[-1].path if present else None


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint: out of sight in one rename, then file by file. A link to one elsewhere only goes. Blocks."""
    doomed = folder.with_name(f"{DELETING}{folder.name}-{secrets.token_hex(4)}")
    folder.rename(doomed)
    fsync_directory(folder.parent)
    if doomed.is_symlink():
        doomed.unlink()
    else:
        shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed process left half-written or half-deleted; who holds the lock knows that nobody is at it."""
    for folder in directory.iterdir():
        if folder.name.startswith((SAVING, DELETING)) and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
