"""Which checkpoints stay, and that pruning touches nothing else."""

import os
import shutil
from pathlib import Path

import pytest

import tierstep
from tierstep.engine.catalog import CheckpointInfo
from tierstep.engine.directory_lock import DirectoryLock
from tierstep.engine.retention import Retention, prune


def infos(*steps):
    return [CheckpointInfo(Path(f"step-{step}"), step, sequence, 0) for sequence, step in enumerate(steps, start=1)]


@pytest.mark.parametrize(
    ("keep", "keep_every", "steps", "gone"),
    [
        (3, None, [1, 2], []),
        (1, None, [1, 2, 3], [1, 2]),
        (None, None, [1, 2, 3, 4], []),
        (1, 10, [5, 10, 15, 20, 25], [5, 15]),
        (2, 10, [0, 7, 11, 12], [7]),
        (1, 1, [1, 2, 3], []),
    ],
)
def test_the_newest_and_the_multiples_stay(keep, keep_every, steps, gone):
    assert [info.step for info in Retention(keep, keep_every).superfluous(infos(*steps))] == gone


def test_of_a_step_that_was_saved_again_only_the_newest_stays():
    doomed = Retention(1, 10).superfluous(infos(10, 20, 10, 30))
    assert [(info.step, info.sequence) for info in doomed] == [(10, 1)]


@pytest.mark.parametrize(
    ("keep", "keep_every", "words"),
    [(0, None, "keep=0"), (True, None, "keep=True"), (3, 0, "keep_every=0"), (3, 2.5, "keep_every=2.5"),
     (None, 5, "keep=None keeps all")],
)  # fmt: skip
def test_a_rule_that_makes_no_sense_is_refused(tmp_path, keep, keep_every, words):
    with pytest.raises(tierstep.ConfigError, match=words):
        tierstep.Checkpoints(tmp_path, keep, keep_every=keep_every)


@pytest.fixture
def saved(tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path, keep=None)
    for step in (5, 10, 15, 20, 25):
        checkpoints.save(step, wait=True)
    return tmp_path


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_saving_leaves_the_newest_and_the_multiples(tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path, keep=2, keep_every=20)
    for step in range(10, 70, 10):
        checkpoints.save(step, wait=True)
    assert [info.step for info in checkpoints.list()] == [20, 40, 50, 60]


def test_pruning_deletes_what_need_not_stay_and_touches_nothing_else(saved):
    (saved / "notes.txt").write_text("mine")
    (saved / "step-00000001").mkdir()
    (saved / "step-00000001/mine.txt").write_text("mine")
    (saved / "step-00000010/manifest.json").write_text("damaged")
    gone = prune(saved, Retention(1, 20))
    assert [info.step for info in gone] == [5, 15]
    assert names(saved) == [
        ".tierstep-lock", "notes.txt", "step-00000001", "step-00000010", "step-00000020", "step-00000025",
    ]  # fmt: skip


def test_a_dry_run_says_the_same_and_changes_nothing(saved):
    before = names(saved)
    with DirectoryLock(saved):  # nor does it need the lock
        assert [info.step for info in prune(saved, Retention(2), dry_run=True)] == [5, 10, 15]
    assert names(saved) == before


def test_pruning_is_refused_while_a_save_is_under_way(saved):
    before = names(saved)
    with DirectoryLock(saved), pytest.raises(tierstep.CheckpointError, match="in use by another run or save"):
        prune(saved, Retention(1))
    assert names(saved) == before


def test_a_place_without_checkpoints_is_refused_and_left_alone(tmp_path):
    with pytest.raises(tierstep.CheckpointError, match="holds no complete checkpoint"):
        prune(tmp_path, Retention(1))
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_changed_is_one_clear_error(saved, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(tierstep.TransferError, match=r"pruning of .* failed: Permission denied"):
        prune(saved, Retention(1))


def test_a_link_to_a_checkpoint_elsewhere_loses_its_name_only(saved, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "step-00000005"
    shutil.move(saved / "step-00000005", elsewhere)
    (saved / "step-00000005").symlink_to(elsewhere)
    prune(saved, Retention(1))
    assert (elsewhere / "manifest.json").is_file()
