"""Every error that tierstep raises on purpose.

    TierstepError
    ├── ConfigError (ValueError)             a setting, path or argument is wrong; nothing was allocated or changed
    │   └── BudgetError                      the budgets cannot hold the state; the message has the numbers
    ├── GradientError (ValueError)           a gradient cannot be used (sparse, NaN, inf); nothing was updated
    ├── StepInterrupted (RuntimeError)       an unfinished step is in the way; the message says how to go on
    ├── TransferError (OSError)              an I/O operation failed or moved fewer bytes than asked; nothing was lost
    │   ├── DiskFull                         there is no space left; the message says how much was asked for
    │   └── TransferTimeout (TimeoutError)   an I/O operation has not completed in time; the message names it
    └── CheckpointError (RuntimeError)       a checkpoint cannot be written or read
        ├── CheckpointCorrupt                bytes are missing or wrong; the message names the file and the tensor
        └── CheckpointMismatch (ValueError)  a sound checkpoint of something else (another model, another format)

A message says what happened, where, and what to do next.
"""

from __future__ import annotations

import errno as errno_codes
from pathlib import Path


class TierstepError(Exception):
    """Root of the tree: `except tierstep.TierstepError` catches everything that tierstep raises on purpose."""


class ConfigError(TierstepError, ValueError):
    """A setting, path or argument is wrong; raised before anything is allocated or changed."""


class BudgetError(ConfigError):
    """The budgets cannot hold the state; raised before anything is allocated."""


class GradientError(TierstepError, ValueError):
    """A gradient cannot be used; raised before any parameter or record is changed."""


class StepInterrupted(TierstepError, RuntimeError):
    """A step failed half-way and has to be finished first."""


class TransferError(TierstepError, OSError):
    """An I/O operation failed or moved fewer bytes than asked.

    `errno` and `filename` are those of the failed operation (`errno` is EIO where the system gave none).
    """

    def __init__(self, message: str, *, path: Path | str | None = None, errno: int = errno_codes.EIO) -> None:
        """Keep the message as a whole; `str(error)` is exactly `message`."""
        super().__init__(errno, message)
        self.errno = errno
        self.filename = None if path is None else str(path)
        self.message = message

    def __str__(self) -> str:
        """Return the message without the builtin's `[Errno N]` prefix, which it already explains."""
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Let the error cross process borders with its keyword arguments."""
        return _rebuild_transfer_error, (type(self), self.message, self.filename, self.errno)


class DiskFull(TransferError):
    """There is no space left where a record or a checkpoint has to go."""


class TransferTimeout(TransferError, TimeoutError):
    """An I/O operation has not completed within its time limit."""


class CheckpointError(TierstepError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointCorrupt(CheckpointError):
    """Bytes of a checkpoint are missing or differ from what was saved."""


class CheckpointMismatch(CheckpointError, ValueError):
    """The checkpoint is sound, but it belongs to something else than what it is restored into."""


def _rebuild_transfer_error(kind: type[TransferError], message: str, path: str | None, errno: int) -> TransferError:
    return kind(message, path=path, errno=errno)
