"""Run in a process of its own: training that is killed at random instants, again and again, and always goes on.

Usage: random_kills_run.py ROOT KILLS [SEED]. Every round forks a trainer that starts as after a crash: it takes over
the newest checkpoint in ROOT, with budgets of its own choice, and trains on, saving after each step. Its parent kills
it (SIGKILL) after a random time. SEED fixes all times and budgets. Each trainer checks what the former one left:

- every checkpoint that is visible is whole, and the newest is at least as new as the last one that `wait` returned,
- weights, state and random numbers after the restore are, in every bit, those of a run that was never interrupted,
- of a dead trainer's scratch files nothing is left when the optimizer is there, of its drafts after the next save,
- files of others are as they were.

The last line says how many kills there were, and at which phase of a trainer.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter, OrderedDict
from pathlib import Path

import torch
import torch._dynamo  # every first optimizer of a process imports this, which takes longer than all the rest

import tierstep
from tierstep import Tiers

from training_runs import OPTIONS, make_parameters, outcome

END = 12  # the step after which a trainer begins anew
LIVES_S = (0.1, 0.4)  # a trainer's life ends before the one or the other, so that some never get to training
PHASES = ("starting", "restoring", "training", "saving", "waiting for the save")
BUDGETS = [
    dict(gpu=0, ram=8 << 10, subgroup=900),
    dict(gpu=0, ram=8 << 10, subgroup=2000),
    dict(gpu=2500, ram=9_500, subgroup=1000, slots=2),
    dict(gpu=0, ram=1 << 20),
]


class Run:
    """A model, its optimizer and scheduler. Gradients are drawn from torch's generator, so its state matters too."""

    def __init__(self, tiers: Tiers) -> None:
        torch.manual_seed(0)
        self.parameters = make_parameters()
        named = OrderedDict((name.replace(".", "_"), p) for name, p in self.parameters.items())
        self.model = torch.nn.ParameterDict(named)
        self.optimizer = tierstep.AdamW(self.parameters.items(), **OPTIONS, tiers=tiers)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train_one_step(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = torch.randn(parameter.shape).to(parameter)
        self.optimizer.step()
        self.scheduler.step()

    def saved_parts(self) -> dict:
        return dict(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def digest(self) -> str:
        """Every bit that the next steps depend on."""
        found = {**outcome(self.optimizer, self.parameters), "random": torch.get_rng_state().numpy().tobytes()}
        found["rate"] = repr(self.optimizer.param_groups[0]["lr"]).encode()
        digest = hashlib.sha256()
        for name in sorted(found):
            digest.update(name.encode() + b"\0" + found[name])
        return digest.hexdigest()


def uninterrupted() -> list[str]:
    """Return the digest after each step of a run that nothing happens to, with all state in memory."""
    run = Run(Tiers(gpu=0, ram=1 << 20))
    with run.optimizer:
        digests = [run.digest()]
        for _ in range(END):
            run.train_one_step()
            digests.append(run.digest())
    return digests


class Trainer:
    """One life. Tells on `report` what it does, because nothing can be asked of it afterwards."""

    def __init__(self, root: Path, expected: list[str], choice: random.Random, report: int) -> None:
        self.nvme, self.directory = root / "nvme", root / "checkpoints"
        self.expected = expected
        self.checkpoints = tierstep.Checkpoints(self.directory, keep=choice.choice([1, 2]))
        self.tiers = Tiers(**choice.choice(BUDGETS), nvme=[self.nvme])
        self.in_background = choice.random() < 0.7
        self.report = report

    def tell(self, *words: object) -> None:
        os.write(self.report, (" ".join(map(str, words)) + "\n").encode())

    def live(self, known: int) -> None:
        """Go on from what is there, for ever. `known` is the sequence of the newest checkpoint known to be complete."""
        self.tell("starting")
        present = self.checkpoints.list()
        for info in present:
            tierstep.verify_checkpoint(info.path)
        newest = present[-1].sequence if present else 0
        assert newest >= known, f"checkpoint {known} was complete, and the newest is {newest}"
        self.train(from_checkpoint=bool(present))
        while True:
            self.train(from_checkpoint=False)

    def train(self, *, from_checkpoint: bool) -> None:
        """Train from the newest checkpoint, or from the start, to `END`."""
        run = Run(self.tiers)
        with run.optimizer:
            scratch = {entry.name for entry in self.nvme.iterdir()} - {"foreign"}
            assert len(scratch) <= 1, f"left in the nvme directory: {scratch}"
            step = 0
            if from_checkpoint:
                self.tell("restoring")
                for parameter in run.parameters.values():
                    parameter.data.zero_()
                self.checkpoints.restore(**run.saved_parts())
                step = self.checkpoints.list()[-1].step
            assert run.digest() == self.expected[step], f"the state after step {step} has other bits"
            while step < END:
                self.tell("training")
                run.train_one_step()
                step += 1
                assert run.digest() == self.expected[step], f"the state after step {step} has other bits"
                self.save(run, step)

    def save(self, run: Run, step: int) -> None:
        self.tell("saving")
        pending = self.checkpoints.save(step, **run.saved_parts())
        if self.in_background and step % 3:
            return  # training goes on, and the next save waits for this one
        self.tell("waiting for the save")
        pending.wait()
        present = self.checkpoints.list()
        self.tell("complete", present[-1].sequence)
        names = {entry.name for entry in self.directory.iterdir()} - {"foreign", ".tierstep-lock"}
        assert names == {info.path.name for info in present}, f"left beside the checkpoints: {names}"
        assert len(present) <= self.checkpoints.keep


def one_life(root: Path, expected: list[str], choice: random.Random, known: int) -> tuple[str, int]:
    """Let a trainer live for a random time; return its phase at the end and what is known to be complete then."""
    reading, writing = os.pipe()
    delay = choice.uniform(0, choice.choice(LIVES_S))
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            Trainer(root, expected, choice, writing).live(known)
        except BaseException:  # noqa: BLE001 - its parent ends
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit("the trainer found something wrong")
    with os.fdopen(reading) as told:
        lines = told.read().splitlines()
    for place in ("nvme", "checkpoints"):
        if (root / place / "foreign").read_text() != "mine":
            raise SystemExit(f"the foreign file in {place} has changed")
    known = max([known, *(int(line.split()[1]) for line in lines if line.startswith("complete"))])
    return next((line for line in reversed(lines) if line in PHASES), "before the start"), known


def in_a_fork(function):
    """Return what a function returns, a list of words; so that this process never starts threads."""
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, " ".join(function()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        words = told.read().split()
    os.wait()
    return words


def main(root: Path, kills: int, seed: int) -> None:
    for place in ("nvme", "checkpoints"):
        (root / place).mkdir(parents=True)
        (root / place / "foreign").write_text("mine")
    expected = in_a_fork(uninterrupted)
    if len(expected) != END + 1:
        raise SystemExit("the run that nothing happens to has failed")
    phases: Counter[str] = Counter()
    choice, known = random.Random(seed), 0
    for number in range(1, kills + 1):
        try:
            phase, known = one_life(root, expected, random.Random(choice.random()), known)
        except SystemExit as error:
            raise SystemExit(f"seed {seed}, after kill {number - 1}: {error}; see {root}") from error
        phases[phase] += 1
    print(f"{kills} kills, seed {seed}, {known} checkpoints were complete; killed while: {dict(phases)}")


if __name__ == "__main__":
    place, count, *given = sys.argv[1:]
    main(Path(place), int(count), int(given[0]) if given else random.SystemRandom().randrange(1 << 32))
