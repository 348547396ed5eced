"""The folder of a training run: what lies where, and whether a run may begin there.

OUT/checkpoints/    complete checkpoints
OUT/losses.jsonl    a line a step
OUT/nvme/           parent of scratch directories, where the tiers ask for "{output}/nvme"
OUT.old-1/          what was there before, set aside by `fresh`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tierstep.configs.schema import OUTPUT, Tiers, TrainConfig
from tierstep.engine.catalog import CheckpointInfo
from tierstep.engine.checkpoint import Checkpoints
from tierstep.engine.directory_lock import DirectoryLock
from tierstep.errors import ConfigError
from tierstep.io.directories import require_directory
from tierstep.io.durable import make_directories


class RunFolder:
    """Paths of a run. Nothing is made or changed before `opened`."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = config.run.output
        self.losses = self.path / "losses.jsonl"
        self.checkpoints = Checkpoints(
            self.path / "checkpoints", keep=config.run.keep, keep_every=config.run.keep_every
        )
        self._own_nvme = own_directories(config)

    def continued(self, *, resume: bool, fresh: bool) -> CheckpointInfo | None:
        """Return the checkpoint that a run continues. Raises `ConfigError` when it is not clear what to do."""
        if resume and fresh:
            raise ConfigError("--resume continues the run and --fresh begins anew: give one of them")
        if fresh:
            return None
        newest = max(self.checkpoints.list(), key=lambda info: info.sequence, default=None)
        if newest is not None and not resume:
            raise ConfigError(
                f"{self.path} already has a run, saved at step {newest.step}: continue it with --resume, set it aside "
                f"with --fresh, or choose another folder with --out"
            )
        return newest

    @contextmanager
    def opened(self, *, fresh: bool) -> Iterator[None]:
        """Make the folder and keep other runs out of it; with `fresh`, first rename what was there.

        Raises `ConfigError` when it cannot be made, `CheckpointError` when another run is using it.
        """
        try:
            if fresh and self._holds_a_run():
                self._set_aside()
            for folder in (self.path, *self._own_nvme):
                make_directories(folder)
        except OSError as error:
            raise ConfigError(
                f"[run] output = '{self.path}' cannot be made or renamed: {error.strerror}; choose another folder"
            ) from error
        with DirectoryLock(require_directory(self.path)):
            yield

    def _holds_a_run(self) -> bool:
        return self.losses.exists() or self.checkpoints.directory.exists()

    def _set_aside(self) -> None:
        names = (self.path.with_name(f"{self.path.name}.old-{number}") for number in count(1))
        with DirectoryLock(self.path):
            self.path.rename(next(name for name in names if not name.exists()))


def own_directories(config: TrainConfig) -> list[Path]:
    """Return the nvme directories inside the run's own folder, which are made with it."""
    pairs = zip(config.tiers.nvme, config.resolved_tiers.nvme, strict=True)
    return [resolved for given, resolved in pairs if OUTPUT in str(given)]


def tiers_before_a_run(config: TrainConfig) -> Tiers:
    """Return the tiers with each nvme directory that a run would make replaced by the nearest one that exists."""
    own = set(own_directories(config))
    tiers = config.resolved_tiers
    return tiers.model_copy(update={"nvme": tuple(_nearest(path) if path in own else path for path in tiers.nvme)})


def _nearest(path: Path) -> Path:
    return next((folder for folder in (path, *path.absolute().parents) if folder.is_dir()), Path("/"))
