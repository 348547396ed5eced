"""`Checkpoints`: a directory of checkpoints, each complete or not there at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstep.engine.directory_lock import DirectoryLock
from tierstep.engine.manifest import MANIFEST_NAME, Manifest, read_manifest
from tierstep.engine.optimizer import AdamW
from tierstep.engine.restoring import restore_into, verify_files
from tierstep.engine.saving import take_snapshot, write_checkpoint
from tierstep.errors import ConfigError
from tierstep.io.durable import fsync_directory
from tierstep.io.selection import open_backend

NAME = re.compile(r"step-(\d{8,})(\.\d+)?")
SAVING, DELETING = ".saving-", ".deleting-"


@dataclass(frozen=True)
class CheckpointInfo:
    """One complete checkpoint of a directory."""

    path: Path
    step: int
    sequence: int
    nbytes: int


class PendingSave:
    """The handle of a save. In this version `save` returns when the checkpoint is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def done(self) -> bool:
        """Say whether the checkpoint is complete."""
        return True

    def wait(self) -> Path:
        """Block until the checkpoint is complete and return its path; raise what went wrong."""
        return self.path


class Checkpoints:
    """Saves into, and restores from, `directory`, which is made if need be.

    A checkpoint becomes visible under its name only when every byte of it is durable; a process that is killed at
    any instant leaves the older ones as they were. `keep` is how many complete ones stay; None keeps all.
    Not thread-safe. Two processes must not save into one directory at once: the second gets a `CheckpointError`.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"keep={keep}: keep at least 1 checkpoint, or give None to keep all")
        self.directory = Path(directory)
        self.keep = keep

    def save(
        self,
        step: int,
        *,
        optimizer: AdamW | None = None,
        model: torch.nn.Module | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> PendingSave:
        """Write a checkpoint named after `step` and delete what `keep` leaves out. Blocks until it is durable.

        Holds weights and buffers of `model`, all of `optimizer`, the random states, and `extra` (numbers, strings,
        lists, tuples, dicts, tensors). Raises `ConfigError` for an `extra` that it cannot hold, `DiskFull` and other
        `TransferError`s: the older checkpoints stay then.
        """
        if step < 0:
            raise ConfigError(f"step={step}: give the number of steps made, 0 or more")
        self.directory.mkdir(parents=True, exist_ok=True)
        with DirectoryLock(self.directory):
            self._remove_leftovers()
            present = self.list()
            sequence = 1 + max((info.sequence for info in present), default=0)
            snapshot = take_snapshot(step, sequence, model, optimizer, extra or {})
            draft = self.directory / f"{SAVING}{step:08d}-{secrets.token_hex(4)}"
            draft.mkdir()
            try:
                with open_backend("threads") as backend:
                    write_checkpoint(draft, snapshot, backend)
                path = self._publish(draft, step)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            self._prune(present)
        return PendingSave(path)

    def restore(
        self,
        *,
        optimizer: AdamW | None = None,
        model: torch.nn.Module | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any] | None:
        """Take over the newest complete checkpoint, or the one at `path`; return its `extra`. Blocks.

        Returns None when the directory has no complete checkpoint. Budgets, subgroup size, kernel and I/O backend
        may differ from those it was saved with. Raises `CheckpointCorrupt` or `CheckpointMismatch` before anything
        is changed; a damaged newest checkpoint is never passed over in silence.
        """
        if path is None:
            present = self.list()
            if not present:
                return None
            path = present[-1].path
        folder = Path(path)
        return restore_into(folder, read_manifest(folder), model, optimizer)

    def list(self) -> tuple[CheckpointInfo, ...]:
        """Return the complete checkpoints, oldest save first. Raises `CheckpointCorrupt` for a damaged manifest."""
        if not self.directory.is_dir():
            return ()
        folders = [f for f in self.directory.iterdir() if NAME.fullmatch(f.name) and (f / MANIFEST_NAME).is_file()]
        infos = (_describe(folder, read_manifest(folder)) for folder in folders)
        return tuple(sorted(infos, key=lambda info: info.sequence))

    def _publish(self, draft: Path, step: int) -> Path:
        """Give a complete draft its name, in one rename; a step that was saved before gets a number of its own."""
        path, again = self.directory / f"step-{step:08d}", 1
        while path.exists():
            again += 1
            path = self.directory / f"step-{step:08d}.{again}"
        draft.rename(path)
        fsync_directory(self.directory)
        return path

    def _prune(self, older: Sequence[CheckpointInfo]) -> None:
        if self.keep is not None:
            for info in older[: max(0, len(older) + 1 - self.keep)]:
                delete_checkpoint(info.path)

    def _remove_leftovers(self) -> None:
        """Remove what a killed process left half-written or half-deleted; the lock says that nobody is at work."""
        for folder in self.directory.iterdir():
            if folder.name.startswith((SAVING, DELETING)) and folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Read every byte of a checkpoint and compare. Raises `CheckpointError` naming what is wrong. Blocks."""
    folder = Path(path)
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    return _describe(folder, manifest)


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint: out of sight in one rename, then file by file. Blocks."""
    doomed = folder.with_name(f"{DELETING}{folder.name}-{secrets.token_hex(4)}")
    folder.rename(doomed)
    fsync_directory(folder.parent)
    shutil.rmtree(doomed)


def _describe(folder: Path, manifest: Manifest) -> CheckpointInfo:
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return CheckpointInfo(folder, manifest.step, manifest.sequence, nbytes)
