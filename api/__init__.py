"""tierstep: AdamW for PyTorch models whose optimizer state fits neither on the GPU nor in host RAM."""

from tierstep.configs.schema import Tiers
from tierstep.engine.catalog import CheckpointInfo
from tierstep.engine.checkpoint import Checkpoints, verify_checkpoint
from tierstep.engine.interchange.exporting import export_checkpoint
from tierstep.engine.interchange.transfer import Exported
from tierstep.engine.optimizer import AdamW
from tierstep.engine.pending import PendingSave
from tierstep.engine.planning import MemoryPlan
from tierstep.engine.trace import LaneReport, StepReport
from tierstep.errors import (
    BudgetError,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    DiskFull,
    GradientError,
    StepInterrupted,
    TierstepError,
    TransferError,
    TransferTimeout,
)
from tierstep.version import __version__

__all__ = [
    "AdamW",
    "BudgetError",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointMismatch",
    "Checkpoints",
    "ConfigError",
    "DiskFull",
    "Exported",
    "GradientError",
    "LaneReport",
    "MemoryPlan",
    "PendingSave",
    "StepInterrupted",
    "StepReport",
    "TierstepError",
    "Tiers",
    "TransferError",
    "TransferTimeout",
    "__version__",
    "export_checkpoint",
    "verify_checkpoint",
]
