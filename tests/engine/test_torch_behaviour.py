"""N2 to N6: what users of torch.optim.AdamW expect."""

import copy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import tierstep
from tierstep import Tiers

from training_runs import OPTIONS, bits, make_parameters, outcome, set_gradients, train

TIERS = Tiers(gpu=0, ram=1 << 20, subgroup=1000)


def make_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))


def pair(make=make_model, **options):
    """Two equal models, one with torch's AdamW and one with ours."""
    theirs, ours = make(), make()
    return (
        (theirs, torch.optim.AdamW(theirs.parameters(), **{**OPTIONS, **options})),
        (ours, tierstep.AdamW(ours.named_parameters(), **{**OPTIONS, **options}, tiers=TIERS)),
    )


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(5, 6, generator=generator)).square().mean().backward()


def assert_close(theirs, ours):
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_steps", [1, 2, 3, 4])
def test_accumulated_gradients(micro_steps, set_to_none):
    for_both = pair()
    for model, optimizer in for_both:
        for step in range(4):
            for micro in range(micro_steps):
                backward(model, 10 * step + micro)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert_close(for_both[0][0], for_both[1][0])


def test_an_unused_parameter_is_left_alone_until_it_is_used():
    for_both = pair()
    for model, optimizer in for_both:
        for step in range(6):
            backward(model, step)
            if step < 3:
                model[2].bias.grad = None
            optimizer.step()
            optimizer.zero_grad()
    assert_close(for_both[0][0], for_both[1][0])
    ours = for_both[1]
    assert ours[1].state[ours[0][2].bias]["step"] == 3
    assert ours[1].state[ours[0][0].bias]["step"] == 6


def test_maximize():
    for_both = pair(maximize=True)
    for model, optimizer in for_both:
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(for_both[0][0], for_both[1][0])


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned():
    _, (model, optimizer) = pair()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 6)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_equals_torchs(dtype):
    _, (model, optimizer) = pair(lambda: make_model().to(dtype))
    model(torch.randn(5, 6, dtype=dtype)).square().sum().backward()
    gradients = [p.grad.float() for p in model.parameters()]
    expected = torch.nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), expected, rtol=1e-6, atol=0)
    model[0].weight.grad.mul_(2)
    assert optimizer.clip_grad_norm_(1.0) > expected


def test_clipping_gives_what_torchs_clipping_gives():
    for_both = pair()
    for model, optimizer in for_both:
        for step in range(5):
            backward(model, step)
            if isinstance(optimizer, tierstep.AdamW):
                optimizer.clip_grad_norm_(0.01)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(for_both[0][0], for_both[1][0])


def test_torchs_own_clipping_works_too():
    for_both = pair()
    for model, optimizer in for_both:
        for step in range(3):
            backward(model, step)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(for_both[0][0], for_both[1][0])


def test_a_clip_that_was_not_used_does_not_reach_a_later_step():
    _, (model, optimizer) = pair()
    _, (unclipped, other) = pair()
    backward(model, 0)
    optimizer.clip_grad_norm_(1e-6)
    optimizer.zero_grad()
    for m, o in ((model, optimizer), (unclipped, other)):
        backward(m, 1)
        o.step()
    assert [bits(p) for p in model.parameters()] == [bits(p) for p in unclipped.parameters()]


def test_gradients_edited_after_clipping_are_refused():
    _, (model, optimizer) = pair()
    backward(model, 0)
    optimizer.clip_grad_norm_(1.0)
    model[0].weight.grad.add_(1)
    with pytest.raises(tierstep.GradientError, match="changed since clip_grad_norm_"):
        optimizer.step()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("clip", [True, False])
def test_a_bad_gradient_is_named_and_nothing_is_updated(bad, clip):
    _, (model, optimizer) = pair()
    backward(model, 0)
    optimizer.step()
    before = outcome(optimizer, dict(model.named_parameters()))
    optimizer.zero_grad()
    backward(model, 1)
    model[2].weight.grad[1, 2] = bad
    if clip:
        assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
    with pytest.raises(tierstep.GradientError, match=r"2\.weight; nothing was updated"):
        optimizer.step()
    assert outcome(optimizer, dict(model.named_parameters())) == before
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()


def test_a_sparse_gradient_is_refused_by_name():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = tierstep.AdamW(embedding.named_parameters(), tiers=TIERS)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(tierstep.GradientError, match="gradient of weight is sparse"):
        optimizer.step()


def test_grad_scaler_skips_a_step_with_inf_and_changes_nothing():
    _, (model, optimizer) = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        loss = model(torch.ones(2, 6) + step).sum()
        scaler.scale(loss).backward()
        before = outcome(optimizer, dict(model.named_parameters()))
        if step == 1:
            model[0].bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        unchanged = outcome(optimizer, dict(model.named_parameters())) == before
        assert unchanged == (step == 1)
    assert optimizer.state[model[0].bias]["step"] == 2


@pytest.mark.parametrize("unscale_and_clip", [True, False])
def test_grad_scaler_gives_the_bits_of_unscaled_training(unscale_and_clip):
    results = []
    for scale in (1.0, 1024.0):
        _, (model, optimizer) = pair()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
        for step in range(3):
            scaler.scale(model(torch.ones(2, 6) + step).sum()).backward()
            if unscale_and_clip:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([bits(p) for p in model.parameters()])
    assert results[0] == results[1]


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "constant": lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5, 3),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "warm restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 2, cycle_momentum=True),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, 10),
    "multiplicative": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_reaches_the_update(name):
    for_both = pair()
    for model, optimizer in for_both:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler = SCHEDULERS[name](optimizer)
            for step in range(5):
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    assert_close(for_both[0][0], for_both[1][0])


def test_reduce_on_plateau_reaches_the_update():
    for_both = pair()
    for model, optimizer in for_both:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for step in range(4):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(1.0)
    assert for_both[1][1].param_groups[0]["lr"] < OPTIONS["lr"]
    assert_close(for_both[0][0], for_both[1][0])


def test_a_learning_rate_may_be_a_tensor():
    for_both = pair(lr=torch.tensor(3e-3))
    for model, optimizer in for_both:
        backward(model, 0)
        optimizer.step()
    assert_close(for_both[0][0], for_both[1][0])


def test_three_groups_with_hyperparameters_of_their_own_and_a_fourth_after_two_steps():
    results = []
    for kind in (torch.optim.AdamW, tierstep.AdamW):
        parameters = {k: torch.nn.Parameter(p.detach().float()) for k, p in make_parameters().items()}
        values = list(parameters.values())
        groups = [
            {"params": [values[0]], "lr": 1e-2},
            {"params": [values[1]], "weight_decay": 0.0},
            {"params": [values[2]], "betas": (0.8, 0.99)},
        ]
        optimizer = kind(groups, **OPTIONS, **({"tiers": TIERS} if kind is tierstep.AdamW else {}))
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": values[3:], "lr": 5e-3})
            set_gradients(parameters, step)
            optimizer.step()
            optimizer.zero_grad()
        results.append(values)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-8)


def test_a_group_that_joins_later_may_be_cold(tmp_path):
    tiers = Tiers(gpu=0, ram=11 << 10, nvme=[tmp_path], subgroup=3000)
    parameters = make_parameters()
    items = list(parameters.items())
    with tierstep.AdamW(items[:2], **OPTIONS, tiers=tiers) as optimizer:
        set_gradients(parameters, 0)
        optimizer.step()
        optimizer.add_param_group({"params": items[2:]})
        train(optimizer, parameters, 1, 4)
        assert optimizer.placement()["nvme"] > 0
        assert optimizer.state[parameters["head.bias"]]["step"] == 3


def test_frozen_parameters_have_no_state_and_may_be_unfrozen_later():
    for_both = pair()
    for model, optimizer in for_both:
        model[0].requires_grad_(False)
        if isinstance(optimizer, tierstep.AdamW):
            optimizer.close()
            optimizer = tierstep.AdamW(model.named_parameters(), **OPTIONS, tiers=TIERS)  # noqa: PLW2901
            before = optimizer.placement()["host"]
            assert before < 33 * 8 + 3 * 64
        for step in range(5):
            if step == 2:
                model[0].requires_grad_(True)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.placement()["host"] > before
    assert_close(for_both[0][0], for_both[1][0])


class Tied(torch.nn.Module):
    """A model that uses one weight in two layers."""

    def __init__(self):
        super().__init__()
        self.body = make_model()
        self.again = torch.nn.Linear(6, 10, bias=False)
        self.again.weight = self.body[0].weight

    def forward(self, inputs):
        return self.body(inputs).sum(dim=1) + self.again(inputs).sum(dim=1)


def test_tied_weights_are_updated_once():
    for_both = pair(Tied)
    for model, optimizer in for_both:
        for step in range(3):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(for_both[0][0], for_both[1][0])
    ours, optimizer = for_both[1]
    assert len(optimizer.training_state.shards) == 4
    assert ours.again.weight is ours.body[0].weight
    assert optimizer.state[ours.again.weight]["step"] == 3


def test_strided_parameters_and_gradients():
    results = []
    for kind in (torch.optim.AdamW, tierstep.AdamW):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(7, 5).t())
        assert not parameter.is_contiguous()
        options = {"tiers": Tiers(gpu=0, ram=1 << 20, subgroup=80)} if kind is tierstep.AdamW else {}
        optimizer = kind([parameter], **OPTIONS, **options)
        for _ in range(3):
            parameter.grad = torch.randn(5, 7)
            optimizer.step()
        results.append(parameter)
    torch.testing.assert_close(*results, rtol=2e-6, atol=1e-8)


def test_unnamed_parameters_get_stable_names():
    model = make_model()
    optimizer = tierstep.AdamW(model.parameters(), tiers=TIERS)
    names = [shard.name for shard in optimizer.training_state.shards]
    assert names == ["group0.param0", "group0.param1", "group0.param2", "group0.param3"]


def test_several_optimizers_share_one_directory(tmp_path):
    tiers = Tiers(gpu=0, ram=8 << 10, nvme=[tmp_path], subgroup=2000)
    runs = [make_parameters(seed) for seed in range(2)]
    optimizers = [tierstep.AdamW(p.items(), **OPTIONS, tiers=tiers) for p in runs]
    for parameters, optimizer in zip(runs, optimizers, strict=True):
        train(optimizer, parameters, 0, 2)
    for optimizer in optimizers:
        optimizer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_state_dict_goes_to_torch_and_back_with_equal_bits():
    _, (model, optimizer) = pair()
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    theirs = torch.optim.AdamW(model.parameters(), lr=1.0)
    theirs.load_state_dict(copy.deepcopy(saved))
    assert theirs.param_groups[0]["lr"] == OPTIONS["lr"]
    _, (back_model, back) = pair()
    back_model.load_state_dict(model.state_dict())
    back.load_state_dict(theirs.state_dict())
    assert outcome(back, dict(back_model.named_parameters())) == outcome(optimizer, dict(model.named_parameters()))


def test_a_state_dict_of_mixed_dtypes_resumes_exactly():
    parameters = make_parameters()
    optimizer = tierstep.AdamW(parameters.items(), **OPTIONS, tiers=TIERS)
    train(optimizer, parameters, 0, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    train(optimizer, parameters, 4, 7)
    again = {name: torch.nn.Parameter(w) for name, w in weights.items()}
    other = tierstep.AdamW(again.items(), tiers=TIERS)
    other.load_state_dict(saved)
    train(other, again, 4, 7)
    assert outcome(other, again) == outcome(optimizer, parameters)


def test_a_state_dict_of_another_model_is_refused_before_anything_changes():
    _, (model, optimizer) = pair()
    backward(model, 0)
    optimizer.step()
    before = outcome(optimizer, dict(model.named_parameters()))
    saved = optimizer.state_dict()
    saved["state"][2]["exp_avg"] = torch.zeros(4, 4)
    with pytest.raises(tierstep.CheckpointMismatch, match=r"exp_avg of 2\.weight has shape \(4, 4\)"):
        optimizer.load_state_dict(saved)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["params"].pop()
    with pytest.raises(tierstep.CheckpointMismatch, match="param groups of"):
        optimizer.load_state_dict(saved)
    assert outcome(optimizer, dict(model.named_parameters())) == before


def test_weights_changed_in_place_are_noticed_by_autograd():
    _, (model, optimizer) = pair()
    loss = model(torch.ones(1, 6)).sum()
    backward(model, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_optimizer_cannot_be_copied():
    _, (_, optimizer) = pair()
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_several_processes_share_one_directory(tmp_path):
    script = Path(__file__).parent.parent / "several_processes_run.py"
    command = [sys.executable, script, tmp_path]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ended = [(run.communicate(timeout=120), run.returncode) for run in runs]
    assert [code for _, code in ended] == [0, 0, 0], ended
    assert len({output for (output, _), _ in ended}) == 1
    assert list(tmp_path.iterdir()) == []


def test_99_percent_frozen_parameters_take_no_state():
    """N6 (ao#1209)."""
    base, adapter = torch.nn.Linear(300, 300), torch.nn.Linear(300, 1)
    base.requires_grad_(False)
    model = torch.nn.Sequential(base, adapter)
    with tierstep.AdamW(model.named_parameters(), tiers=TIERS) as optimizer:
        assert sum(optimizer.placement().values()) <= 301 * 8 + 4 * 64
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        assert set(optimizer.state) == set(adapter.parameters())
