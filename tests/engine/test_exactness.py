"""N1: placement never changes the numbers."""

import tempfile
import warnings

import pytest
import torch

import tierstep
from tierstep import Tiers
from tierstep.io.directories import BufferedFallbackWarning

from machine import needs_uring
from training_runs import OPTIONS, STATE_BYTES, make_parameters, outcome, run, set_gradients, train

ENOUGH = 1 << 20
STEPS = 30  # as `run` makes


@pytest.fixture(scope="module")
def expected():
    return run(Tiers(gpu=0, ram=ENOUGH, threads=1, kernel="reference"))


def everything_cold(path, **options):
    return Tiers(gpu=0, ram=8 << 10, nvme=[path], **{"subgroup": 2000, **options})


def test_host_only(expected):
    assert run(Tiers(gpu=0, ram=ENOUGH, threads=2)) == expected


def test_device_only(expected):
    assert run(Tiers(gpu=ENOUGH, ram=0, threads=2)) == expected


def test_nvme_only(expected, tmp_path):
    assert run(everything_cold(tmp_path)) == expected


def test_the_layouts_of_these_tests_are_what_they_say(tmp_path):
    with tierstep.AdamW(make_parameters().items(), tiers=everything_cold(tmp_path)) as optimizer:
        assert [tier for tier, nbytes in optimizer.placement().items() if nbytes] == ["nvme"]


def test_a_single_slot(expected, tmp_path):
    assert run(everything_cold(tmp_path, slots=1)) == expected


def test_three_tiers_at_once(expected, tmp_path):
    tiers = Tiers(gpu=2500, ram=9_500, nvme=[tmp_path], subgroup=1000, slots=2)
    parameters = make_parameters()
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers) as optimizer:
        assert all(optimizer.placement().values()), optimizer.placement()
        train(optimizer, parameters, 0, STEPS)
        assert outcome(optimizer, parameters) == expected


@pytest.mark.parametrize("subgroup", [1, 8, 77, 640, 4096, ENOUGH])
def test_any_subgroup_size(expected, subgroup):
    assert run(Tiers(gpu=0, ram=ENOUGH, subgroup=subgroup)) == expected


@pytest.mark.parametrize("subgroup", [64, 777, 5000])
def test_any_subgroup_size_on_nvme(expected, tmp_path, subgroup):
    assert run(Tiers(gpu=0, ram=8 << 10, nvme=[tmp_path], subgroup=subgroup)) == expected


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_kernel_and_number_of_threads(expected, kernel, threads):
    assert run(Tiers(gpu=0, ram=ENOUGH, subgroup=500, kernel=kernel, threads=threads)) == expected


def test_a_file_system_without_o_direct(expected):
    """I6 (LMCache#4364): whatever tmpfs does about O_DIRECT here, the bits are the same."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", BufferedFallbackWarning)
        assert run(everything_cold(folder)) == expected


@needs_uring
def test_the_uring_backend(expected, tmp_path):
    assert run(everything_cold(tmp_path, backend="uring")) == expected


@pytest.mark.libaio
def test_the_libaio_backend(expected, tmp_path):
    assert run(everything_cold(tmp_path, backend="libaio")) == expected


def test_two_directories(expected, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tiers = everything_cold(tmp_path / "a")
    assert run(tiers.model_copy(update={"nvme": (tmp_path / "a", tmp_path / "b")})) == expected


def test_the_state_of_the_test_model_is_what_the_tests_think():
    parameters = make_parameters()
    with tierstep.AdamW(parameters.items(), tiers=Tiers(ram=ENOUGH, gpu=0)) as optimizer:
        held = optimizer.placement()["host"]
    assert STATE_BYTES <= held <= STATE_BYTES + 64 * 4 * 3  # cache-line padding of the fields


def test_fp32_equals_torch_within_a_millionth_after_100_steps():
    ours, theirs = ({k: p.detach().float() for k, p in make_parameters().items()} for _ in range(2))
    ours = {k: torch.nn.Parameter(v) for k, v in ours.items()}
    theirs = {k: torch.nn.Parameter(v) for k, v in theirs.items()}
    reference = torch.optim.AdamW(theirs.values(), **OPTIONS)
    with tierstep.AdamW(ours.items(), **OPTIONS, tiers=Tiers(gpu=0, ram=ENOUGH)) as optimizer:
        for step in range(100):
            set_gradients(ours, step)
            for name, parameter in theirs.items():
                parameter.grad = ours[name].grad.clone()
            optimizer.step()
            reference.step()
    for name in ours:
        difference = (ours[name] - theirs[name]).norm() / theirs[name].norm()
        assert difference < 1e-6, name


def test_two_directories_hold_the_files_and_change_no_bit(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    parameters = make_parameters()
    tiers = tierstep.Tiers(gpu=0, ram="9KiB", nvme=folders, subgroup=640, slots=2)
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers) as optimizer:
        train(optimizer, parameters, 0, 5)
        assert all(list(folder.rglob("record-*")) for folder in folders)
        assert outcome(optimizer, parameters) == run(tierstep.Tiers(), steps=5)
