"""`losses.jsonl`: one JSON line a step, with the loss for people (`loss`) and for comparing bits (`loss_hex`)."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from tierstep.io.durable import fsync_file
from tierstep.io.failures import named_failures


class LossLog:
    """Appends to the file at `path`, which keeps its lines up to step `keep_through` and loses all later ones.

    A line is with the operating system when `add` returns, so a killed process loses none; `sync` makes them durable.
    Raises `TransferError`, or `DiskFull`.
    """

    def __init__(self, path: Path, keep_through: int) -> None:
        self._path = path
        with named_failures(f"opening {path}", path):
            self._file = path.open("a+b", buffering=0)
            self._file.truncate(_bytes_through(path, keep_through))

    def add(self, step: int, loss: float) -> None:
        """Append the line of a step."""
        line = json.dumps({"step": step, "loss": loss, "loss_hex": loss.hex()})
        with named_failures(f"writing a line to {self._path}", self._path):
            self._file.write(line.encode() + b"\n")

    def sync(self) -> None:
        """Return when all lines are on the drive."""
        fsync_file(self._path)

    def __enter__(self) -> LossLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _bytes_through(path: Path, step: int) -> int:
    """Return the length of the file's beginning that holds whole lines of steps up to `step`."""
    length = 0
    with path.open("rb") as file:
        for line in file:
            found = _step_of(line)
            if found is None or found > step:
                break
            length += len(line)
    return length


def _step_of(line: bytes) -> int | None:
    """Return the step of a line; None for what is not a whole line of ours."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None
