"""Run in a process of its own: for every n, a fork saves twice and dies at the n-th change of the second save.

Usage: kill_points_run.py ROOT. Fork n works in ROOT/n and is killed before its n-th change to the drive; a write is
cut in half instead. Fork 0 lives on, and tells how many changes there are. Prints their number.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import OrderedDict
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch._dynamo  # every first optimizer of a process imports this, which takes longer than all the rest

import tierstep
from tierstep import Tiers

from training_runs import OPTIONS, make_parameters, train

FIRST, SECOND = 3, 5  # the steps that are saved
AUDITED = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate"}
UNAUDITED = ["fsync", "posix_fallocate"]
WRITES = ["write", "pwritev"]


def start(root: Path, seed: int = 0):
    """Return parameters, model, and an optimizer with state on all tiers, whose nvme directory is in `root`."""
    parameters = make_parameters(seed)
    model = torch.nn.ParameterDict(OrderedDict((name.replace(".", "_"), p) for name, p in parameters.items()))
    tiers = Tiers(gpu=2500, ram=9_500, nvme=[root / "nvme"], subgroup=1000, slots=2)
    return parameters, model, tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers)


class Killer:
    """Counts what changes the drive from now on, and kills this process at the `number`-th change."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._changes = count(1)
        for name in UNAUDITED:
            setattr(os, name, partial(self._call, getattr(os, name)))
        for name in WRITES:
            setattr(os, name, partial(self._write, getattr(os, name), name.endswith("v")))
        sys.addaudithook(self._audit)

    def changes(self) -> int:
        """Return how many there were; asked once, at the end."""
        return next(self._changes) - 1

    def _is_due(self) -> bool:
        return next(self._changes) == self._number

    def _audit(self, event: str, arguments: tuple) -> None:
        opens_for_writing = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (event in AUDITED or opens_for_writing) and self._is_due():
            die()

    def _call(self, function, *arguments):
        if self._is_due():
            die()
        return function(*arguments)

    def _write(self, function, vector, descriptor, data, *rest):
        if not self._is_due():
            return function(descriptor, data, *rest)
        whole = memoryview(data[0] if vector else data).cast("B")
        half = whole[: whole.nbytes // 2]
        function(descriptor, [half] if vector else half, *rest)
        return die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_twice(root: Path, number: int) -> None:
    (root / "nvme").mkdir(parents=True)
    (root / "nvme" / "foreign").write_text("mine")
    (root / "checkpoints").mkdir()
    (root / "checkpoints" / "foreign").write_text("mine")
    parameters, model, optimizer = start(root)
    checkpoints = tierstep.Checkpoints(root / "checkpoints", keep=1)
    train(optimizer, parameters, 0, FIRST)
    checkpoints.save(FIRST, optimizer=optimizer, model=model, extra={"tensor": torch.ones(3)}, wait=True)
    train(optimizer, parameters, FIRST, SECOND)
    killer = Killer(number)
    checkpoints.save(SECOND, optimizer=optimizer, model=model, extra={"tensor": torch.ones(3)}, wait=True)
    (root / "changes").write_text(str(killer.changes()))
    die()  # before anything is closed


def in_a_fork(root: Path, number: int) -> None:
    """Save twice in a fork; raise unless it was killed."""
    child = os.fork()
    if not child:
        try:
            save_twice(root / str(number), number)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit(f"fork {number} was not killed: status {status}")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    in_a_fork(place, 0)
    total = int((place / "0" / "changes").read_text())
    for n in range(1, total + 1):
        in_a_fork(place, n)
    print(total)
