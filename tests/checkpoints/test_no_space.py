"""I4: a drive that fills up in the middle of a save. The older checkpoint stays, training goes on, the error counts."""

import re
import resource
from contextlib import contextmanager, suppress

import pytest
import torch

import tierstep
from tierstep import Tiers
from tierstep.engine import saving
from tierstep.io.threads import ThreadBackend

from machine import mounted
from training_runs import OPTIONS, make_parameters, outcome, run, train

FIRST, SECOND, THIRD = 3, 5, 7
pytestmark = pytest.mark.filterwarnings("ignore::tierstep.io.directories.BufferedFallbackWarning")


@pytest.fixture(scope="module")
def expected():
    return {step: run(Tiers(gpu=0, ram=1 << 20), steps=step) for step in (FIRST, THIRD)}


@pytest.fixture
def small_drive(tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m", "tmpfs") as directory:
        yield directory


@pytest.fixture
def fill_up(small_drive):
    """Somebody else fills the drive; `heal` makes room again."""

    def fill_up():
        with (small_drive / "foreign").open("ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    return fill_up


def start(tiers=None, seed=0):
    parameters = make_parameters(seed)
    tiers = tiers or Tiers(gpu=0, ram=1 << 20, subgroup=1000)
    model = torch.nn.ParameterDict({name.replace(".", "_"): p for name, p in parameters.items()})
    return parameters, model, tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers)


def first_calling(fill_up, function):
    def full(*arguments, **options):
        fill_up()
        return function(*arguments, **options)

    return full


def fill_at_record(monkeypatch, fill_up):
    class Filled(ThreadBackend):
        allocated = 0

        def allocate(self, path, nbytes):
            self.allocated += 1
            if self.allocated == 4:
                fill_up()
            super().allocate(path, nbytes)

    monkeypatch.setattr("tierstep.engine.checkpoint.open_backend", lambda name: Filled())


def fill_at_weights(monkeypatch, fill_up):
    monkeypatch.setattr(saving, "write_tensors", first_calling(fill_up, saving.write_tensors))


def fill_at_manifest(monkeypatch, fill_up):
    monkeypatch.setattr(saving, "write_manifest", first_calling(fill_up, saving.write_manifest))


WHEN = {"records": fill_at_record, "model.safetensors": fill_at_weights, "manifest.json": fill_at_manifest}


@pytest.mark.parametrize("where", WHEN)
def test_a_drive_that_fills_up_during_a_save(small_drive, fill_up, monkeypatch, expected, where):
    checkpoints = tierstep.Checkpoints(small_drive / "checkpoints")
    parameters, model, optimizer = start()
    with optimizer:
        train(optimizer, parameters, 0, FIRST)
        older = checkpoints.save(FIRST, model=model, optimizer=optimizer).wait()
        train(optimizer, parameters, FIRST, SECOND)
        with monkeypatch.context() as patched:
            WHEN[where](patched, fill_up)
            pending = checkpoints.save(SECOND, model=model, optimizer=optimizer)
            train(optimizer, parameters, SECOND, THIRD)
            with pytest.raises(tierstep.DiskFull, match=rf"step {SECOND} was not saved.*{where}.*ENOSPC") as caught:
                pending.wait()
        writes, free, missing = map(int, re.search(r"writes (\d+) .* (\d+) are free .* (\d+) are missing",
                                                   str(caught.value)).groups())  # fmt: skip
        assert (writes > 13_000, missing) == (True, max(0, writes - free))
        assert {entry.name for entry in checkpoints.directory.iterdir()} == {".tierstep-lock", older.name}
        assert outcome(optimizer, parameters) == expected[THIRD]
        fill_up()
        with pytest.raises(tierstep.DiskFull, match=r"does not fit .* (\d+) are missing"):
            checkpoints.save(THIRD, model=model, optimizer=optimizer)
        check_restores(checkpoints, FIRST, expected)
        (small_drive / "foreign").unlink()
        checkpoints.save(THIRD, model=model, optimizer=optimizer, wait=True)
        check_restores(checkpoints, THIRD, expected)


def check_restores(checkpoints, step, expected):
    parameters, model, optimizer = start(seed=1)
    with optimizer:
        checkpoints.restore(model=model, optimizer=optimizer)
        assert outcome(optimizer, parameters) == expected[step]


def test_training_fails_and_goes_on_when_the_drive_is_full_after_a_save(small_drive, fill_up, expected):
    """What the checkpoint has linked cannot be overwritten, and there is no room for another file."""
    (small_drive / "nvme").mkdir()
    checkpoints = tierstep.Checkpoints(small_drive / "checkpoints")
    tiers = Tiers(gpu=0, ram=8 << 10, nvme=[small_drive / "nvme"], subgroup=1000)
    parameters, model, optimizer = start(tiers)
    with optimizer:
        train(optimizer, parameters, 0, FIRST)
        older = checkpoints.save(FIRST, model=model, optimizer=optimizer).wait()
        fill_up()
        with pytest.raises(tierstep.DiskFull, match="record-"):
            train(optimizer, parameters, FIRST, FIRST + 1)
        tierstep.verify_checkpoint(older)
        (small_drive / "foreign").unlink()
        optimizer.step()
        train(optimizer, parameters, FIRST + 1, THIRD)
        assert outcome(optimizer, parameters) == expected[THIRD]
    check_restores(checkpoints, FIRST, expected)


@contextmanager
def file_size_limit(nbytes):
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@pytest.mark.parametrize("limit", [0, 1000, 4096, 6000])
def test_a_limit_of_file_sizes_is_named_and_the_older_checkpoint_stays(tmp_path, expected, limit):
    checkpoints = tierstep.Checkpoints(tmp_path)
    parameters, model, optimizer = start()
    with optimizer:
        train(optimizer, parameters, 0, FIRST)
        older = checkpoints.save(FIRST, model=model, optimizer=optimizer).wait()
        train(optimizer, parameters, FIRST, SECOND)
        with file_size_limit(limit), pytest.raises(tierstep.TransferError, match="file size limit"):
            checkpoints.save(SECOND, model=model, optimizer=optimizer).wait()
        assert {entry.name for entry in tmp_path.iterdir()} == {".tierstep-lock", older.name}
        train(optimizer, parameters, SECOND, THIRD)
        checkpoints.save(THIRD, model=model, optimizer=optimizer, wait=True)
        check_restores(checkpoints, THIRD, expected)
