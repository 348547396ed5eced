"""What the numbers of a run depend on, and whether a checkpoint may be continued with other settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstep.configs.schema import TrainConfig
from tierstep.data import TextData
from tierstep.engine.manifest import read_manifest
from tierstep.errors import CheckpointMismatch, ConfigError

KEY = "tierstep.train"  # in a checkpoint's extra
NO_NUMBERS = {"model": {"activation_checkpointing"}, "data": {"path", "max_bytes"}}  # data counts by its digest


@dataclass(frozen=True)
class RunIdentity:
    """`numbers` are the settings that decide every loss, by dotted key; `threads` those of forward and backward."""

    numbers: dict[str, Any]
    threads: int
    torch_version: str

    def as_extra(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, as JSON values."""
        return {KEY: {"numbers": self.numbers, "threads": self.threads, "torch": self.torch_version}}

    def notices(self) -> tuple[str, ...]:
        """Return what may make a difference although it was not refused."""
        if self.torch_version == torch.__version__:
            return ()
        return (f"the run began with torch {self.torch_version}, this is {torch.__version__}: last bits may differ",)


def identify(config: TrainConfig, data: TextData) -> RunIdentity:
    """Return the identity of a run that begins now."""
    numbers = {
        f"{section}.{key}": value
        for section in ("model", "data", "optimizer")
        for key, value in getattr(config, section).model_dump(mode="json").items()
        if key not in NO_NUMBERS.get(section, ())
    }
    numbers |= {"data.text": data.digest, "run.seed": config.run.seed}
    numbers |= {"run.accumulation_steps": config.run.accumulation_steps}
    return RunIdentity(numbers, config.run.threads or torch.get_num_threads(), str(torch.__version__))


def read_identity(checkpoint: Path) -> RunIdentity:
    """Return the identity of a saved run. Raises `CheckpointError`, also when `train` did not write the checkpoint."""
    extra = read_manifest(checkpoint).extra
    saved = extra.get(KEY) if isinstance(extra, Mapping) else None
    if saved is None:
        raise CheckpointMismatch(f"{checkpoint} was not written by `tierstep train`: restore it from your own loop")
    return RunIdentity(saved["numbers"], saved["threads"], saved["torch"])


def require_same(saved: RunIdentity, present: RunIdentity, config: TrainConfig, checkpoint: Path) -> None:
    """Raise `ConfigError` naming every setting that decides numbers and differs from the saved run's."""
    before = saved.numbers | {"run.threads": saved.threads}
    now = present.numbers | {"run.threads": config.run.threads or saved.threads}
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if changed:
        differences = ", ".join(f"{key} = {now.get(key)!r} (was {before.get(key)!r})" for key in changed)
        raise ConfigError(
            f"{checkpoint} belongs to a run with other settings: {differences}; set them back to resume it, or begin "
            f"anew with --fresh"
        )
