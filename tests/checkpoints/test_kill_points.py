"""C2: a process that is killed at any instant of a save leaves whole checkpoints, and nothing that stays."""

import subprocess
import sys
from pathlib import Path

import pytest
from kill_points_run import FIRST, SECOND, start

import tierstep
from tierstep import Tiers

from training_runs import outcome, run

SCRIPT = Path(__file__).parent.parent / "kill_points_run.py"


@pytest.fixture(scope="module")
def expected():
    """The bits after each of the two saves, from runs that were never killed."""
    return {step: run(Tiers(gpu=0, ram=1 << 20), steps=step) for step in (FIRST, SECOND)}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The directories of processes that were killed, by the number of the change at which they were."""
    root = tmp_path_factory.mktemp("killed")
    ended = subprocess.run([sys.executable, SCRIPT, root], check=True, capture_output=True, text=True)
    assert ended.stderr == ""
    return [root / str(n) for n in range(1, int(ended.stdout) + 1)] + [root / "0"]


def names(directory):
    return {entry.name for entry in directory.iterdir()}


def drafts(directory):
    return {name for name in names(directory) if name.startswith((".saving-", ".deleting-"))}


def check(root, expected):
    """Check what is left of one killed process, and that work goes on from there; return the step it goes on from."""
    checkpoints = tierstep.Checkpoints(root / "checkpoints", keep=1)
    present = checkpoints.list()
    for info in present:
        tierstep.verify_checkpoint(info.path)
    abandoned = names(root / "nvme")
    assert len(abandoned) == 2
    parameters, model, optimizer = start(root, seed=1)
    with optimizer:
        assert names(root / "nvme") & abandoned == {"foreign"}
        checkpoints.restore(model=model, optimizer=optimizer)
        assert outcome(optimizer, parameters) == expected[present[-1].step]
        path = checkpoints.save(SECOND + 1, model=model, optimizer=optimizer).wait()
        assert names(root / "checkpoints") == {".tierstep-lock", "foreign", path.name}
        tierstep.verify_checkpoint(path)
    assert names(root / "nvme") == {"foreign"}
    assert {(root / name / "foreign").read_text() for name in ("nvme", "checkpoints")} == {"mine"}
    return present[-1].step


def test_a_process_killed_at_any_change_to_the_drive_leaves_one_save_or_the_other(killed, expected):
    left = [drafts(root / "checkpoints") for root in killed]
    steps = []
    for root in killed:
        try:
            steps.append(check(root, expected))
        except BaseException as error:
            raise AssertionError(f"killed at change {root.name} of {len(killed) - 1}: {error}") from error
    assert steps == sorted(steps)  # the commit is one instant: before it the old one is there, after it the new one
    assert set(steps) == {FIRST, SECOND}
    assert {name[: name.index("-")] for found in left for name in found} == {".saving", ".deleting"}  # both were met
