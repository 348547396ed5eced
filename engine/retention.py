"""Which checkpoints stay when newer ones come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstep.engine.catalog import CheckpointInfo, delete_checkpoint, list_sound
from tierstep.engine.directory_lock import DirectoryLock
from tierstep.errors import CheckpointError, ConfigError
from tierstep.io.failures import named_failures

LOGGER = logging.getLogger("tierstep")


@dataclass(frozen=True)
class Retention:
    """The `keep` newest saves stay (None: all), and the newest save of each step that is a multiple of `keep_every`."""

    keep: int | None = 3
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and (not _is_whole(self.keep) or self.keep < 1):
            raise ConfigError(f"keep={self.keep}: keep at least 1 checkpoint, a whole number, or give None to keep all")
        if self.keep_every is not None and (not _is_whole(self.keep_every) or self.keep_every < 1):
            raise ConfigError(f"keep_every={self.keep_every}: give a number of steps, 1 or more, or None")
        if self.keep is None and self.keep_every is not None:
            raise ConfigError("keep=None keeps all, so keep_every keeps nothing more: give a number for keep")

    def superfluous(self, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return those that need not stay, given all that there are, oldest save first."""
        if self.keep is None:
            return []
        newest_of_step = {info.step: info.sequence for info in checkpoints}
        return [info for info in checkpoints[: -self.keep] if not self._stays(info, newest_of_step[info.step])]

    def _stays(self, info: CheckpointInfo, newest_of_step: int) -> bool:
        return self.keep_every is not None and info.step % self.keep_every == 0 and info.sequence == newest_of_step


def prune(directory: Path, retention: Retention, *, dry_run: bool = False) -> list[CheckpointInfo]:
    """Delete the checkpoints of a directory that need not stay, oldest first; return them. Blocks.

    With `dry_run` only returns them. Files that no save made, and checkpoints with a damaged manifest, are left alone.
    Raises `CheckpointError` while a save or another pruning is under way there, before anything is deleted.
    """
    if not list_sound(directory):
        raise CheckpointError(f"{directory} holds no complete checkpoint: name a directory of checkpoints")
    if dry_run:
        return retention.superfluous(list_sound(directory))
    with named_failures(f"pruning of {directory}", directory), DirectoryLock(directory):
        doomed = retention.superfluous(list_sound(directory))
        for info in doomed:
            delete_checkpoint(info.path)
    return doomed


def prune_older(older: Sequence[CheckpointInfo], newest: CheckpointInfo, retention: Retention) -> None:
    """Delete what need not stay beside a checkpoint that has just been completed; failures are logged. Blocks."""
    for info in retention.superfluous([*older, newest]):
        try:
            delete_checkpoint(info.path)
        except FileNotFoundError:
            continue  # somebody has deleted it already
        except OSError as error:  # the new checkpoint is complete all the same
            LOGGER.warning("the superfluous checkpoint %s was not deleted: %s", info.path, error)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
