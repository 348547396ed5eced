"""What is on the drive when the power goes at any instant: the old checkpoint or the new one, whole, and no rubbish.

And the other way round: without any one of the fsyncs, there is an instant at which that does not hold.
"""

from __future__ import annotations

import shutil
from itertools import count

import pytest
import torch
from kill_points_run import start
from power_loss import Recorder, Sync, states_after_power_loss, write_tree

import tierstep
from tierstep import Tiers
from tierstep.io.scratch import open_scratch

from training_runs import outcome, run, train

SAVED = (2, 4, 6)  # steps that are saved; a checkpoint of each replaces the former one
RESTART = 4  # the step after which another optimizer goes on, from the checkpoint
END = 8


@pytest.fixture(scope="module")
def expected():
    """The bits after each step that matters, from a run that nothing happened to."""
    return {step: run(Tiers(gpu=0, ram=1 << 20), steps=step) for step in (*SAVED, END)}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    """A run with three saves and a restore; the labels say which steps a restore may come to."""
    root = tmp_path_factory.mktemp("recorded")
    (root / "nvme").mkdir()
    (root / "nvme" / "foreign").write_text("mine")
    with Recorder(root) as found:
        found.label = {None}
        parameters, model, optimizer = start(root)
        checkpoints, done = tierstep.Checkpoints(root / "run" / "checkpoints", keep=1), 0
        for step in SAVED:
            train(optimizer, parameters, done, step)
            found.label = {*found.label, step}
            checkpoints.save(step, optimizer=optimizer, model=model, extra={"tensor": torch.ones(3)}, wait=True)
            found.label, done = {step}, step
            if step == RESTART:
                optimizer.close()
                parameters, model, optimizer = start(root, seed=1)
                checkpoints.restore(model=model, optimizer=optimizer)
        train(optimizer, parameters, done, END)
        optimizer.close()
    return found


def names_of(tree):
    return tuple((name, None if isinstance(content, bytes) else names_of(content)) for name, content in tree)


class Judge:
    """Says what can be restored from a state of the drive. Looks at equal states once."""

    def __init__(self, folder, expected):
        self._folder = folder
        self._expected = expected
        self._restored = {}
        self._cleaned = set()
        self._numbers = count()

    def check(self, label, tree):
        found = dict(tree)
        checkpoints = dict(found.get("run", ())).get("checkpoints", ())
        visible = tuple(entry if entry[0].startswith("step-") else entry[0].split("-")[0] for entry in checkpoints)
        if visible not in self._restored:
            self._restored[visible] = self._restore(self._new(checkpoints))
        assert self._restored[visible] in label
        names = names_of(found["nvme"])
        if names not in self._cleaned:
            self._clean(self._new(found["nvme"]))
            self._cleaned.add(names)

    def _new(self, tree):
        return write_tree(tree, self._folder / str(next(self._numbers)) / "tree")

    def _restore(self, directory):
        """Return the step that a restore comes to, when all is as it must be."""
        checkpoints = tierstep.Checkpoints(directory, keep=1)
        for folder in directory.glob("step-*"):
            tierstep.verify_checkpoint(folder)
        (directory.parent / "nvme").mkdir()
        parameters, model, optimizer = start(directory.parent, seed=1)
        with optimizer:
            if checkpoints.restore(model=model, optimizer=optimizer) is None:
                return None
            step = checkpoints.list()[-1].step
            assert outcome(optimizer, parameters) == self._expected[step]
            train(optimizer, parameters, step, END)
            assert outcome(optimizer, parameters) == self._expected[END]
            path = checkpoints.save(END, model=model, optimizer=optimizer).wait()
            assert {entry.name for entry in directory.iterdir()} == {".tierstep-lock", path.name}
        shutil.rmtree(directory.parent)
        return step

    def _clean(self, directory):
        open_scratch(directory).close()
        assert [entry.name for entry in directory.iterdir()] in (["foreign"], [])


@pytest.fixture(scope="module")
def judge(tmp_path_factory, expected):
    return Judge(tmp_path_factory.mktemp("judged"), expected)


@pytest.fixture(autouse=True)
def _no_need_to_sync(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def test_after_a_power_loss_at_any_instant_the_old_or_the_new_checkpoint_is_there(recorder, judge):
    for label, tree in states_after_power_loss(recorder):
        judge.check(label, tree)


def test_no_fsync_is_superfluous(recorder, judge):
    sites = {event.site for event in recorder.events if isinstance(event, Sync)}
    superfluous = [site for site in sites if all_sound(recorder, judge, site)]
    assert superfluous == []


def all_sound(recorder, judge, without):
    try:
        for label, tree in states_after_power_loss(recorder, without):
            judge.check(label, tree)
    except (AssertionError, tierstep.TierstepError):
        return False
    return True
