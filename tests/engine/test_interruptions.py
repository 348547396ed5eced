"""What happens around a step that users really do: Ctrl-C, a fork, a converted model, a skipped step."""

import os
import signal

import pytest
import torch

import tierstep
from tierstep import Tiers
from tierstep.io.faults import Fail
from tierstep.io.memory import MemoryBackend

from training_runs import OPTIONS, make_parameters, outcome, run, set_gradients, train

STEPS = 4
WARM = Tiers(gpu=0, ram=1 << 20, subgroup=300)


@pytest.fixture(scope="module")
def expected():
    return run(Tiers(gpu=0, ram=1 << 20), steps=STEPS)


@pytest.mark.parametrize("fetches_before", [0, 1, 5, 20])
@pytest.mark.parametrize("cold", [False, True])
def test_ctrl_c_in_a_step_and_a_retry_give_the_same_bits(tmp_path, expected, fetches_before, cold):
    """The lanes went on in the background, so that the retry updated some subgroups twice."""
    tiers = Tiers(gpu=0, ram=8 << 10, nvme=[tmp_path], subgroup=300) if cold else WARM
    parameters = make_parameters()
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers) as optimizer:
        train(optimizer, parameters, 0, 2)
        store, count = optimizer.training_state.store, iter(range(1000))
        fetch = store.fetch

        def interrupted_fetch(index):
            if next(count) == fetches_before:
                os.kill(os.getpid(), signal.SIGINT)
            return fetch(index)

        store.fetch = interrupted_fetch
        set_gradients(parameters, 2)
        optimizer.clip_grad_norm_(10.0)
        try:
            optimizer.step()
        except KeyboardInterrupt:
            optimizer.step()
        optimizer.zero_grad()
        train(optimizer, parameters, 3, STEPS)
        assert outcome(optimizer, parameters) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_converted_after_construction_is_refused_by_name(dtype):
    """Writing records of one dtype with weights of another was a segmentation fault."""
    model = torch.nn.Linear(4, 4).bfloat16()
    optimizer = tierstep.AdamW(model.named_parameters(), tiers=WARM)
    model.to(dtype)
    model(torch.ones(1, 4, dtype=dtype)).sum().backward()
    with pytest.raises(tierstep.ConfigError, match=r"parameter weight had 16 elements of torch\.bfloat16.*convert"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_files_and_may_not_step(tmp_path):
    parameters = make_parameters()
    tiers = Tiers(gpu=0, ram=8 << 10, nvme=[tmp_path], subgroup=1000)
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers) as optimizer:
        train(optimizer, parameters, 0, 2)
        child = os.fork()
        if not child:
            try:
                optimizer.step()
            except tierstep.ConfigError:
                optimizer.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        train(optimizer, parameters, 2, 4)


def test_a_failed_scaler_step_leaves_no_scale_behind(monkeypatch, tmp_path):
    backend = MemoryBackend()
    monkeypatch.setattr("tierstep.tiers.build.open_backend", lambda *_, **__: backend)
    parameters = make_parameters()
    tiers = Tiers(gpu=0, ram=8 << 10, nvme=[tmp_path], subgroup=1000)
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers) as optimizer:
        train(optimizer, parameters, 0, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        set_gradients(parameters, 1)
        backend.inject(Fail(5), at=len(backend.log))
        with pytest.raises(tierstep.TransferError):
            scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")


def test_a_clip_of_a_step_that_was_skipped_does_not_reach_the_next():
    results = []
    for skipped in (False, True):
        model = torch.nn.Linear(3, 3)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.zero_()
        optimizer = tierstep.AdamW(model.named_parameters(), tiers=WARM)
        if skipped:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.clip_grad_norm_(1e-6)
            model.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        results.append(optimizer.state[model.weight]["exp_avg"])
    assert torch.equal(*results)


def test_two_clips_of_one_step_clip_to_the_smaller_norm():
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = tierstep.AdamW([weight], betas=(0.0, 0.9), tiers=WARM)
    weight.grad = torch.ones(100)
    assert optimizer.clip_grad_norm_(0.01) == 10.0
    assert optimizer.clip_grad_norm_(1.0) < 0.0101
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].norm() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group")
def test_a_parameter_given_twice_is_refused():
    weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(tierstep.ConfigError, match="given twice"):
        tierstep.AdamW([("a", weight), ("b", weight)], tiers=WARM)


@pytest.mark.parametrize(
    "edit",
    [
        lambda saved: saved["param_groups"][0].update(lr=-1.0),
        lambda saved: saved["param_groups"][0].update(amsgrad=True),
        lambda saved: saved["state"][0].update(step=float("nan")),
        lambda saved: saved["state"][0].update(step=-1),
        lambda saved: saved["state"][0].update(exp_avg=[1.0]),
        lambda saved: saved.pop("state"),
    ],
)
def test_an_unsound_state_dict_is_refused_before_anything_changes(edit):
    parameters = make_parameters()
    optimizer = tierstep.AdamW(parameters.items(), **OPTIONS, tiers=WARM)
    train(optimizer, parameters, 0, 1)
    before, saved = outcome(optimizer, parameters), optimizer.state_dict()
    edit(saved)
    with pytest.raises(tierstep.CheckpointMismatch):
        optimizer.load_state_dict(saved)
    assert outcome(optimizer, parameters) == before
    assert optimizer.param_groups[0]["lr"] == OPTIONS["lr"]


def test_a_closed_optimizer_says_so():
    parameters = make_parameters()
    optimizer = tierstep.AdamW(parameters.items(), tiers=WARM)
    optimizer.close()
    with pytest.raises(tierstep.ConfigError, match="was closed"):
        optimizer.step()


def test_joining_parameters_stay_within_the_ram_budget(tmp_path):
    tiers = Tiers(gpu=0, ram=40 << 10, nvme=[tmp_path], subgroup=4000)
    first, second = torch.nn.Parameter(torch.zeros(8000)), torch.nn.Parameter(torch.zeros(8000))
    with tierstep.AdamW([("first", first)], tiers=tiers) as optimizer:
        optimizer.add_param_group({"params": [("second", second)]})
        assert optimizer.plan.pinned_bytes <= 40 << 10
