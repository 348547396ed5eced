"""`Checkpoints`: a directory of checkpoints, each complete or not there at all."""

from __future__ import annotations

import logging
import operator
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
from tierstep.errors import CheckpointError, ConfigError
from tierstep.io.directories import require_directory
from tierstep.io.durable import fsync_directory, make_directories
from tierstep.io.failures import named_failures
from tierstep.io.selection import open_backend

NAME = re.compile(r"step-(\d{8,})(\.\d+)?")
MAX_STEP = 1 << 60
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
        self.error_was_raised = False
        self._thread = threading.Thread(target=self._run, name="tierstep-save")
        self._thread.start()

    def done(self) -> bool:
        """Say whether the save has ended, well or badly. Never blocks."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Block until the save has ended, well or badly; raise nothing."""
        self._thread.join()

    def wait(self) -> Path:
        """Block until the checkpoint is complete and return its path; raise what went wrong, as often as asked."""
        self.join()
        if self._error is not None:
            self.error_was_raised = True
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
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ConfigError(f"keep={keep}: keep at least 1 checkpoint, a whole number, or give None to keep all")
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
        step = _checked_step(step)
        _check_kinds(model, optimizer, extra)
        self._await_last()
        self._make_directory()
        with ExitStack() as resources:
            resources.enter_context(DirectoryLock(self.directory))
            self._remove_leftovers()
            present, _ = self._look()
            sequence = 1 + max((info.sequence for info in present), default=0)
            draft = self.directory / f"{SAVING}{step:08d}-{secrets.token_hex(4)}"
            draft.mkdir()
            resources.callback(shutil.rmtree, draft, ignore_errors=True)  # nothing is left of it once it is published
            snapshot = take_snapshot(draft, (step, sequence), model, optimizer, extra or {})
            if snapshot.frozen is not None:
                resources.callback(snapshot.frozen.close)
            rest = resources.pop_all()
        with ExitStack() as unless_started:
            unless_started.push(rest)
            pending = PendingSave(lambda: self._finish(draft, snapshot, present, rest))
            unless_started.pop_all()
        self._last = pending
        if wait:
            pending.wait()
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
        _check_kinds(model, optimizer, None)
        self._await_last()
        if path is None:
            path = self._newest()
            if path is None:
                return None
        folder = Path(path).resolve()
        return restore_into(folder, read_manifest(folder), model, optimizer)

    def list(self) -> tuple[CheckpointInfo, ...]:
        """Return the complete checkpoints, oldest save first; those with a damaged manifest are left out and logged."""
        present, damaged = self._look()
        for error in damaged.values():
            LOGGER.warning("%s", error)
        return present

    def _look(self) -> tuple[tuple[CheckpointInfo, ...], dict[Path, CheckpointError]]:
        """Return the sound checkpoints, oldest save first, and what is wrong with the others."""
        found, damaged = [], {}
        for folder in self.directory.iterdir() if self.directory.is_dir() else ():
            if not NAME.fullmatch(folder.name) or not (folder / MANIFEST_NAME).is_file():
                continue
            try:
                found.append(_describe(folder, read_manifest(folder)))
            except (CheckpointError, FileNotFoundError) as error:
                if isinstance(error, CheckpointError) and folder.exists():  # else it was pruned a moment ago
                    damaged[folder] = error
        return tuple(sorted(found, key=lambda info: info.sequence)), damaged

    def _newest(self) -> Path | None:
        """Return the newest complete checkpoint; raise if a damaged one may be newer, going by its name."""
        present, damaged = self._look()
        for folder, error in damaged.items():
            name = NAME.fullmatch(folder.name)
            if not present or (name is not None and int(name[1]) >= present[-1].step):
                raise error
            LOGGER.warning("%s", error)
        return present[-1].path if present else None

    def _make_directory(self) -> None:
        try:
            make_directories(self.directory)
        except OSError as error:
            raise ConfigError(f"{self.directory} cannot hold checkpoints ({error}): give another directory") from error
        require_directory(self.directory)

    def _finish(self, draft: Path, snapshot: Snapshot, older: Sequence[CheckpointInfo], resources: ExitStack) -> Path:
        """Write a snapshot, publish it, delete what is superfluous, and let go of the directory."""
        with resources:
            with open_backend("threads") as backend:
                write_checkpoint(draft, snapshot, backend)
            path = self._publish(draft, snapshot.step)
            self._prune(older)
        return path

    def _await_last(self) -> None:
        """Wait for the last save; raise its error if nobody has been told of it yet."""
        last = self._last
        if last is None:
            return
        last.join()
        self._last = None
        if not last.error_was_raised:
            last.wait()

    def _publish(self, draft: Path, step: int) -> Path:
        """Give a complete draft its name, in one rename; a step that was saved before gets a number of its own."""
        path, again = self.directory / f"step-{step:08d}", 1
        while path.exists():
            again += 1
            path = self.directory / f"step-{step:08d}.{again}"
        with named_failures(f"publication of {path}", path):
            draft.rename(path)
        fsync_directory(self.directory)
        return path

    def _prune(self, older: Sequence[CheckpointInfo]) -> None:
        if self.keep is not None:
            for info in older[: max(0, len(older) + 1 - self.keep)]:
                try:
                    delete_checkpoint(info.path)
                except FileNotFoundError:
                    continue  # somebody has deleted it already
                except OSError as error:  # the new checkpoint is complete all the same
                    LOGGER.warning("the superfluous checkpoint %s was not deleted: %s", info.path, error)

    def _remove_leftovers(self) -> None:
        """Remove what a killed process left half-written or half-deleted; the lock says that nobody is at work."""
        for folder in self.directory.iterdir():
            if folder.name.startswith((SAVING, DELETING)) and folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Read every byte of a checkpoint and compare. Raises `CheckpointError` naming what is wrong. Blocks."""
    folder = Path(path).resolve()
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    return _describe(folder, manifest)


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint: out of sight in one rename, then file by file. Blocks."""
    doomed = folder.with_name(f"{DELETING}{folder.name}-{secrets.token_hex(4)}")
    folder.rename(doomed)
    fsync_directory(folder.parent)
    shutil.rmtree(doomed)


def _checked_step(step: object) -> int:
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= MAX_STEP:
        raise ConfigError(f"step={step!r}: give the number of steps made, a whole number from 0 on")
    return number


def _check_kinds(model: object, optimizer: object, extra: object) -> None:
    for name, value, kind in (
        ("model", model, torch.nn.Module),
        ("optimizer", optimizer, AdamW),
        ("extra", extra, Mapping),
    ):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name} is a {type(value).__name__}: give a {kind.__module__}.{kind.__qualname__}")


def _describe(folder: Path, manifest: Manifest) -> CheckpointInfo:
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return CheckpointInfo(folder, manifest.step, manifest.sequence, nbytes)
