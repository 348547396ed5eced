"""`Checkpoints`: a directory of checkpoints, each complete or not there at all."""

from __future__ import annotations

import operator
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from errno import ENOSPC
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tierstep.engine.catalog import SAVING, CheckpointInfo, describe, list_sound, look, newest, remove_leftovers
from tierstep.engine.contents import collect
from tierstep.engine.directory_lock import DirectoryLock
from tierstep.engine.manifest import read_manifest
from tierstep.engine.optimizer import AdamW
from tierstep.engine.pending import PendingSave
from tierstep.engine.restoring import restore_into, verify_files
from tierstep.engine.retention import Retention, prune_older
from tierstep.engine.saving import Snapshot, take_snapshot, write_checkpoint
from tierstep.engine.signal_flag import SignalFlag, as_numbers
from tierstep.engine.stateful import Stateful, given_parts
from tierstep.errors import ConfigError, DiskFull
from tierstep.io.directories import require_directory
from tierstep.io.durable import fsync_directory, make_directories
from tierstep.io.failures import free_bytes, named_failures
from tierstep.io.selection import open_backend

MAX_STEP = 1 << 60


class Checkpoints:
    """Saves into, and restores from, `directory`, which is made if need be.

    A checkpoint becomes visible under its name only when every byte of it is durable; a process that is killed at
    any instant leaves the older ones as they were. The `keep` newest complete ones stay (None: all), and so does every
    step that is a multiple of `keep_every`.
    Not thread-safe. Two processes must not save into one directory at once: the second gets a `CheckpointError`.

    `on_signal` names a signal, or several, that from now on only make `save_requested` say so, until `close` or the end
    of a `with` block (see `SignalFlag`). Raises `ConfigError` outside the main thread, or for what is no signal.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        *,
        keep_every: int | None = None,
        on_signal: int | Iterable[int] | None = None,
    ) -> None:
        Retention(keep, keep_every)  # is checked
        self.directory = Path(directory)
        self.keep = keep
        self.keep_every = keep_every
        self._last: PendingSave | None = None
        self._signals = SignalFlag(*as_numbers(on_signal))
        if on_signal is not None:
            self._signals.install()

    def save_requested(self) -> bool:
        """Say whether a signal of `on_signal` has come: save with `wait=True` after the step under way, and end."""
        return self._signals.received is not None

    def close(self) -> None:
        """Wait for the save under way, and give the signals back. Raises its error if nobody has seen it."""
        self._signals.close()
        self._await_last()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def save(
        self,
        step: int,
        *,
        optimizer: AdamW | None = None,
        model: torch.nn.Module | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        data: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> PendingSave:
        """Begin a checkpoint named after `step`, of the values as they are now, whatever training does meanwhile.

        Holds weights and buffers of `model`, all of `optimizer`, the random states, the `state_dict()` of `scheduler`,
        `scaler` and `data` (a `StatefulDataLoader`, or your own), and `extra`; these may consist of numbers, strings,
        lists, tuples, dicts and tensors. Blocks while the weights are copied in memory and cold records are linked;
        the rest is written in the background (`wait=True`: before this returns), and `PendingSave.wait()` raises what
        goes wrong there. A save that is still under way is waited for first, and its error, if nobody has seen it,
        is raised here.

        Raises `ConfigError` naming what a checkpoint cannot hold, before anything is written, and `DiskFull` when there
        is not enough space. When a save fails, the older checkpoints are as they were. When the new one is complete,
        those go that need not stay.
        """
        step = _checked_step(step)
        _check_kinds(model, optimizer, extra)
        if optimizer is not None:
            optimizer.stepper.require_whole("save a checkpoint")
        contents = collect(model, given_parts(scheduler=scheduler, scaler=scaler, data=data), extra or {})
        self._await_last()
        self._make_directory()
        with ExitStack() as resources:
            resources.enter_context(DirectoryLock(self.directory))
            remove_leftovers(self.directory)
            present, _ = look(self.directory)
            sequence = 1 + max((info.sequence for info in present), default=0)
            draft = self.directory / f"{SAVING}{step:08d}-{secrets.token_hex(4)}"
            draft.mkdir()
            resources.callback(shutil.rmtree, draft, ignore_errors=True)  # nothing is left of it once it is published
            snapshot = take_snapshot(draft, (step, sequence), contents, optimizer)
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
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        data: Stateful | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any] | None:
        """Take over the newest complete checkpoint, or the one at `path`; return its `extra`. Blocks.

        Returns None when the directory has no complete checkpoint. Budgets, subgroup size, kernel and I/O backend
        may differ from those it was saved with. Raises `CheckpointCorrupt` or `CheckpointMismatch` before anything
        is changed, also when `scheduler`, `scaler` or `data` refuses its state; a damaged newest checkpoint is never
        passed over in silence.
        """
        _check_kinds(model, optimizer, None)
        parts = given_parts(scheduler=scheduler, scaler=scaler, data=data)
        self._await_last()
        if path is None:
            path = newest(self.directory)
            if path is None:
                return None
        folder = Path(path).resolve()
        return restore_into(folder, read_manifest(folder), model, optimizer, parts)

    def list(self) -> tuple[CheckpointInfo, ...]:
        """Return the complete checkpoints, oldest save first; those with a damaged manifest are left out and logged."""
        return list_sound(self.directory)

    def _make_directory(self) -> None:
        try:
            make_directories(self.directory)
        except OSError as error:
            raise ConfigError(f"{self.directory} cannot hold checkpoints ({error}): give another directory") from error
        require_directory(self.directory)

    def _finish(self, draft: Path, snapshot: Snapshot, older: Sequence[CheckpointInfo], resources: ExitStack) -> Path:
        """Write a snapshot, publish it, delete what is superfluous, and let go of the directory."""
        retention = Retention(self.keep, self.keep_every)
        try:
            with resources:
                with open_backend("threads") as backend:
                    write_checkpoint(draft, snapshot, backend)
                path = self._publish(draft, snapshot.step)
                prune_older(older, CheckpointInfo(path, snapshot.step, snapshot.sequence, 0), retention)
        except DiskFull as error:
            raise self._without_room(snapshot, error) from error
        return path

    def _without_room(self, snapshot: Snapshot, error: DiskFull) -> DiskFull:
        """Say how much is missing for a save that was given up half-way, now that its draft is gone."""
        free = free_bytes(self.directory)
        return DiskFull(
            f"the checkpoint of step {snapshot.step} was not saved, and the older ones are as they were: {error}. "
            f"It writes {snapshot.written_nbytes} bytes, {free} are free in {self.directory} without it, "
            f"{max(0, snapshot.written_nbytes - free)} are missing",
            path=error.filename,
            errno=error.errno or ENOSPC,
        )

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


def verify_checkpoint(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Read every byte of a checkpoint and compare. Raises `CheckpointError` naming what is wrong. Blocks."""
    folder = Path(path).resolve()
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    return describe(folder, manifest)


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
