"""The GPU's part of the pipeline over a fake device: same bits as the CPU's, whatever is late."""

import pytest
import torch

import tierstep
from tests.fake_accelerator import FakeAccelerator
from tests.training_runs import OPTIONS, STATE_BYTES, make_parameters, outcome, run, set_gradients
from tierstep.errors import BudgetError, ConfigError, GradientError


@pytest.fixture
def accelerator(monkeypatch):
    fake = FakeAccelerator()
    monkeypatch.setattr("tierstep.engine.optimizer.accelerator_of", lambda device: fake)
    return fake


def run_on(accelerator, tiers, steps=6, **options):
    parameters = make_parameters()
    with tierstep.AdamW(parameters.items(), **{**OPTIONS, **options}, tiers=tiers) as optimizer:
        for step in range(steps):
            accelerator.settle_caller()
            set_gradients(parameters, step)
            optimizer.clip_grad_norm_(10.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.settle_caller()
        return outcome(optimizer, parameters), optimizer.report()


EXPECTED = {}


def expected(steps=6):
    if steps not in EXPECTED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tierstep.engine.optimizer.accelerator_of", lambda device: None)
            EXPECTED[steps] = run(tierstep.Tiers(), steps=steps)
    return EXPECTED[steps]


@pytest.mark.parametrize("schedule", ["greedy", "stride", "cpu", "gpu"])
@pytest.mark.parametrize("gpu", [None, "3KiB", 2 * STATE_BYTES])
@pytest.mark.parametrize("files", [False, True])
def test_every_schedule_and_budget_gives_the_bits_of_the_cpu(accelerator, schedule, gpu, files, tmp_path):
    ram, nvme = (17_000, [tmp_path]) if files else (None, ())
    tiers = tierstep.Tiers(gpu=gpu, ram=ram, nvme=nvme, subgroup=640, slots=3 if files else None, schedule=schedule)
    got, report = run_on(accelerator, tiers)
    assert got == expected()
    updated = report.updated
    if schedule in ("cpu", "gpu") and gpu is None:
        assert not updated["gpu" if schedule == "cpu" else "cpu"]


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_late_work_changes_a_bit(accelerator, seed):
    accelerator.random.seed(seed)
    got, report = run_on(accelerator, tierstep.Tiers(subgroup=400))
    assert got == expected()
    assert sorted(report.updated["gpu"] + report.updated["cpu"]) == list(
        range(len(set(report.updated["gpu"]) | set(report.updated["cpu"])))
    )


def test_without_a_budget_on_the_gpu_the_cpu_updates_everything(accelerator):
    got, report = run_on(accelerator, tierstep.Tiers(gpu=0, subgroup=640))
    assert got == expected()
    assert report.updated["gpu"] == ()


def test_records_of_the_device_tier_are_updated_where_they_are(accelerator):
    _, report = run_on(accelerator, tierstep.Tiers(gpu=2 * STATE_BYTES, subgroup=640))
    assert report.updated["cpu"] == ()
    assert report.lanes["h2d"].bytes == report.lanes["d2h"].bytes == 0


def test_transfers_are_counted_in_the_report(accelerator):
    parameters = {"weight": torch.nn.Parameter(torch.randn(640).bfloat16())}
    with tierstep.AdamW(parameters.items(), tiers=tierstep.Tiers(subgroup=640, schedule="stride")) as optimizer:
        parameters["weight"].grad = torch.randn(640).bfloat16()
        optimizer.step()
        accelerator.settle_caller()
        report = optimizer.report()
    assert (len(report.updated["gpu"]), len(report.updated["cpu"])) == (5, 5)
    assert report.lanes["h2d"].bytes == 5 * 640 + 5 * 64 * 2
    assert report.lanes["d2h"].bytes == 5 * 640 + 5 * 64 * 4


def test_a_strided_parameter_is_updated_on_both_processors(accelerator):
    weights, gradients = torch.randn(24, 40).bfloat16(), torch.randn(24, 40).bfloat16()
    results = []
    for strided in (False, True):
        parameter = torch.nn.Parameter(weights.clone().t() if strided else weights.t().contiguous())
        with tierstep.AdamW([parameter], tiers=tierstep.Tiers(subgroup=640, schedule="stride")) as optimizer:
            for _ in range(3):
                parameter.grad = gradients.clone().t() if strided else gradients.t().contiguous()
                optimizer.step()
                accelerator.settle_caller()
        results.append(parameter.detach().contiguous())
    assert torch.equal(*results)


def test_nan_in_a_gradient_names_the_parameter_and_changes_nothing(accelerator):
    parameters = make_parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with tierstep.AdamW(parameters.items(), tiers=tierstep.Tiers(subgroup=640)) as optimizer:
        set_gradients(parameters, 0)
        parameters["norm.weight"].grad[3] = float("nan")
        with pytest.raises(GradientError, match=r"norm\.weight; nothing"):
            optimizer.step()
    assert all(torch.equal(before[name], parameter) for name, parameter in parameters.items())


def test_parameters_that_join_later_get_larger_slots(accelerator):
    first = torch.nn.Parameter(torch.randn(16).bfloat16())
    later = torch.nn.Parameter(torch.randn(300).bfloat16())
    weights = [first.detach().clone(), later.detach().clone()]
    with tierstep.AdamW([first], tiers=tierstep.Tiers(subgroup=1280)) as optimizer:
        optimizer.add_param_group({"params": [later]})
        first.grad, later.grad = torch.ones(16).bfloat16(), torch.ones(300).bfloat16()
        optimizer.step()
        accelerator.settle_caller()
        report = optimizer.report()
    assert report.updated["gpu"] + report.updated["cpu"]
    assert not torch.equal(first, weights[0])
    assert not (later == weights[1]).all()


@pytest.mark.parametrize(
    ("tiers", "error", "text"),
    [
        (dict(gpu=600, subgroup=640), BudgetError, "cannot hold one record"),
        (dict(gpu=2 << 30, subgroup="512MiB"), BudgetError, "GPU's memory"),
    ],
)
def test_a_budget_that_cannot_be_met_is_refused_with_numbers(accelerator, tiers, error, text):
    size = 1000 if tiers["subgroup"] == 640 else 1 << 20
    if size > 1000:
        accelerator.free_bytes = lambda: 1000
    with pytest.raises(error, match=text):
        tierstep.AdamW([torch.nn.Parameter(torch.randn(size).bfloat16())], tiers=tierstep.Tiers(**tiers))


def test_the_gpu_cannot_be_told_to_do_everything_in_no_memory():
    with pytest.raises(ConfigError, match="leaves nobody"):
        tierstep.Tiers(gpu=0, schedule="gpu")
