"""`Checkpoints`: a directory of checkpoints, each complete or not there at all."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstep.engine.directory_lock import DirectoryLock
from tierstep.engine.manifest import MANIFEST_NAME, Manifest, read_manifest
from tierstep.engine.optimizer import AdamW
from tierstep.engine.restoring import restore_into, verify_files
from tierstep.engine.saving import Snapshot, take_snapshot, write_checkpoint
from tierstep.errors import ConfigError
from tierstep.io.durable import fsync_directory
from tierstep.io.selection import open_backend

NAME = re.compile(r"step-(\d{8,})(\.\d+)?")
LOGGER = logging.getLogger("tierstep")
SAVING, DELETING = ".saving-", ".deleting-"


@dataclass(frozen=True)
class CheckpointInfo:
    """One complete checkpoint of a directory."""

    path: Path
    step: int
    sequence: int
    nbytes: int


class PendingSave:
    """The handle of a save that goes on in the background. Any thread may ask."""

    def __init__(self, finish: Callable[[], Path]) -> None:
        self._finish = finish
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tierstep-save")
        self._thread.start()

    def done(self) -> bool:
        """Say whether the save has ended, well or badly. Never blocks."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Block until the checkpoint is complete and return its path; raise what went wrong, as often as asked."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._path is None:
            raise ValueError("a save ended without an outcome")
        return self._path

    def _run(self) -> None:
        try:
            self._path = self._finish()
        except BaseException as error:  # noqa: BLE001 - it appears in `wait`
            self._error = error
            LOGGER.error("a checkpoint was not saved: %s", error)  # for whoever never waits


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
        self._last: PendingSave | None = None

    def save(
        self,
        step: int,
        *,
        optimizer: AdamW | None = None,
        model: torch.nn.Module | None = None,
        extra: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> PendingSave:
        """Begin a checkpoint named after `step`, of the values as they are now, whatever training does meanwhile.

        Holds weights and buffers of `model`, all of `optimizer`, the random states, and `extra` (numbers, strings,
        lists, tuples, dicts, tensors). Blocks while the weights are copied in memory and cold records are linked;
        the rest is written in the background (`wait=True`: before this returns), and `PendingSave.wait()` raises what
        goes wrong there. A save that is still under way is waited for first, and its error, if nobody has seen it,
        is raised here.

        Raises `ConfigError` for an `extra` that it cannot hold, and `DiskFull` when there is not enough space. When a
        save fails, the older checkpoints are as they were. Deletes what `keep` leaves out when the new one is complete.
        """
        if step < 0:
            raise ConfigError(f"step={step}: give the number of steps made, 0 or more")
        self._await_last()
        self.directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as resources:
            resources.enter_context(DirectoryLock(self.directory))
            self._remove_leftovers()
            present = self.list()
            sequence = 1 + max((info.sequence for info in present), default=0)
            draft = self.directory / f"{SAVING}{step:08d}-{secrets.token_hex(4)}"
            draft.mkdir()
            resources.callback(shutil.rmtree, draft, ignore_errors=True)  # nothing is left of it once it is published
            snapshot = take_snapshot(draft, (step, sequence), model, optimizer, extra or {})
            if snapshot.frozen is not None:
                resources.callback(snapshot.frozen.close)
            rest = resources.pop_all()
        self._last = PendingSave(lambda: self._finish(draft, snapshot, present, rest))
        pending = self._last
        if wait:
            self._await_last()
        return pending

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
        self._await_last()
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

    def _finish(self, draft: Path, snapshot: Snapshot, older: Sequence[CheckpointInfo], resources: ExitStack) -> Path:
        """Write a snapshot, publish it, delete what is superfluous, and let go of the directory."""
        with resources:
            with open_backend("threads") as backend:
                write_checkpoint(draft, snapshot, backend)
            path = self._publish(draft, snapshot.step)
            self._prune(older)
        return path

    def _await_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.wait()

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
