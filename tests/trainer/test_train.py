import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from tierstep.configs.load import load_config
from tierstep.errors import CheckpointError, CheckpointMismatch, ConfigError
from tierstep.observer import Silent
from tierstep.train import train

from trainer.tiny_training import losses, tiny_config, write_config

ALL_ON_ONE_TIER = {"tiers__gpu": 0, "tiers__ram": "8MiB", "tiers__nvme": [], "tiers__subgroup": "1MiB"}
DIE_AT_STEP = """
import os, signal, sys
from tierstep.configs.load import load_config
from tierstep.engine import saving
from tierstep.engine.pipeline import Pipeline
from tierstep.train import train

place, path = sys.argv[1:]
counts = {"step": 0, "save": 0}
run, write_manifest = Pipeline.run, saving.write_manifest

def dying_step(self, *arguments):
    counts["step"] += 1
    if place == "step" and counts["step"] == 5:
        arguments = (*arguments[:3], lambda subgroup: os.kill(os.getpid(), signal.SIGKILL))
    run(self, *arguments)

def dying_save(folder, manifest):
    counts["save"] += 1
    if place == "save" and counts["save"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write_manifest(folder, manifest)

Pipeline.run, saving.write_manifest = dying_step, dying_save
train(load_config(path))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The losses of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train(tiny_config(folder))
    return losses(folder / "run")


class StopAt(Silent):
    """Sends this process a signal in the middle of a run."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step(self, event):
        if event.step == self.step:
            os.kill(os.getpid(), self.number)


class Notes(Silent):
    def on_start(self, start):
        self.start = start


def test_a_run_uses_all_tiers_and_lowers_the_loss(tmp_path):
    result = train(tiny_config(tmp_path))
    assert all(result.tier_bytes.values())
    assert result.losses[-1] < result.losses[0]
    assert (result.first_step, result.steps, len(result.losses)) == (1, 8, 8)
    assert result.checkpoint == tmp_path / "run/checkpoints/step-00000008"
    assert [float.fromhex(bits) for _, bits in losses(tmp_path / "run")] == list(result.losses)
    assert result.lanes["write"].bytes == 8 * result.bytes_written_per_step > 0
    assert result.moved_bytes["write"] >= result.lanes["write"].bytes


@pytest.mark.parametrize(
    "change", [{}, ALL_ON_ONE_TIER, {"tiers__subgroup": "7KiB"}, {"tiers__kernel": "reference"}], ids=str
)
def test_a_resumed_run_has_the_losses_of_one_that_was_not_interrupted(tmp_path, whole, change):
    train(tiny_config(tmp_path, run__steps=4))
    result = train(tiny_config(tmp_path, **change), resume=True)
    assert (result.first_step, result.steps) == (5, 8)
    assert losses(tmp_path / "run") == whole


@pytest.mark.parametrize("place", ["step", "save"])
def test_a_run_killed_in_a_step_or_in_a_save_resumes_to_the_same_losses(tmp_path, whole, place):
    line = [sys.executable, "-c", DIE_AT_STEP, place, str(write_config(tmp_path))]
    assert subprocess.run(line, check=False).returncode == -signal.SIGKILL
    assert len(losses(tmp_path / "run")) > 3  # more than the checkpoint has
    train(tiny_config(tmp_path), resume=True)
    assert losses(tmp_path / "run") == whole
    assert list((tmp_path / "run/nvme").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_a_step_with_a_checkpoint(tmp_path, whole, number):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    result = train(tiny_config(tmp_path), observer=StopAt(4, number))
    assert (result.stopped_by, result.steps, result.checkpoint.name) == (number, 5, "step-00000005")
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    train(tiny_config(tmp_path), resume=True)
    assert losses(tmp_path / "run") == whole


def test_a_run_in_another_thread_installs_no_handlers(tmp_path, whole):
    thread = threading.Thread(target=train, args=[tiny_config(tmp_path)])
    thread.start()
    thread.join()
    assert losses(tmp_path / "run") == whole


def test_the_losses_file_is_cut_to_the_resumed_step(tmp_path):
    train(tiny_config(tmp_path, run__steps=3))
    with (tmp_path / "run/losses.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0, "loss_hex": "0x1p+0"}\n{"step": 5, "lo')
    train(tiny_config(tmp_path, run__steps=4), resume=True)
    found = losses(tmp_path / "run")
    assert [step for step, _ in found] == [1, 2, 3, 4]
    assert found[3][1] != "0x1p+0"


def test_an_existing_run_is_refused_naming_both_flags(tmp_path):
    train(tiny_config(tmp_path, run__steps=1))
    with pytest.raises(ConfigError, match=r"saved at step 1.*--resume.*--fresh"):
        train(tiny_config(tmp_path))


def test_fresh_sets_the_old_run_aside_and_deletes_nothing(tmp_path):
    for _ in range(3):
        train(tiny_config(tmp_path, run__steps=1), fresh=True)
    runs = sorted(path.name for path in tmp_path.glob("run*"))
    assert runs == ["run", "run.old-1", "run.old-2"]
    assert all((tmp_path / name / "checkpoints/step-00000001/manifest.json").is_file() for name in runs)


def test_fresh_leaves_a_folder_alone_that_holds_no_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").touch()
    train(tiny_config(tmp_path, run__steps=1), fresh=True)
    assert (tmp_path / "run/mine.txt").exists()


def test_an_output_that_is_a_file_or_read_only_is_refused(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        train(config)
    (tmp_path / "run").unlink()
    monkeypatch.setattr(os, "access", lambda path, *_: path != config.run.output)
    with pytest.raises(ConfigError, match="not writable"):
        train(config)


def test_resume_and_fresh_together_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="give one of them"):
        train(tiny_config(tmp_path), resume=True, fresh=True)


def test_resume_without_a_checkpoint_says_that_it_starts_from_scratch(tmp_path):
    notes = Notes()
    result = train(tiny_config(tmp_path, run__steps=1), resume=True, observer=notes)
    assert result.steps == 1
    assert notes.start.resumed_from is None
    assert "starting from scratch" in notes.start.notices[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model__intermediate_size": 48}, r"model.intermediate_size = 48 \(was 64\)"),
        ({"data__batch_size": 3}, "data.batch_size"),
        ({"data__max_bytes": 4000}, "data.text"),
        ({"optimizer__lr": 0.5, "run__seed": 7}, r"optimizer.lr = 0.5 \(was 0.01\), run.seed = 7"),
        ({"run__accumulation_steps": 1}, "run.accumulation_steps"),
        ({"run__threads": 2}, "run.threads"),
    ],
    ids=str,
)
def test_resuming_with_settings_that_change_numbers_is_refused_naming_them(tmp_path, change, named):
    train(tiny_config(tmp_path, run__steps=1))
    before = losses(tmp_path / "run")
    with pytest.raises(ConfigError, match=named):
        train(tiny_config(tmp_path, **change), resume=True)
    assert losses(tmp_path / "run") == before


def test_the_threads_of_the_first_part_are_kept(tmp_path):
    config = write_config(tmp_path)
    config.write_text(config.read_text().replace("threads = 1", ""))
    before = torch.get_num_threads()
    train(load_config(config, {"run.steps": 1, "run.threads": before + 1}))
    seen = []

    class Look(Silent):
        def on_step(self, event):
            seen.append(torch.get_num_threads())

    train(load_config(config, {"run.steps": 2}), resume=True, observer=Look())
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_a_checkpoint_of_somebody_elses_loop_is_refused(tmp_path):
    import tierstep

    tierstep.Checkpoints(tmp_path / "run/checkpoints").save(1, extra={"mine": 1}, wait=True)
    with pytest.raises(CheckpointMismatch, match="was not written by `tierstep train`"):
        train(tiny_config(tmp_path), resume=True)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    class StartAnother(Silent):
        def on_start(self, start):
            with pytest.raises(CheckpointError, match="in use by another run or save"):
                train(tiny_config(tmp_path), observer=Silent())

    train(tiny_config(tmp_path, run__steps=1), observer=StartAnother())


def test_a_finished_run_resumes_to_nothing(tmp_path):
    first = train(tiny_config(tmp_path))
    again = train(tiny_config(tmp_path), resume=True)
    assert (again.losses, again.steps, again.checkpoint) == ((), 8, first.checkpoint)
