"""E3 and bad input: one clear error before anything is changed."""

import pytest
import torch

import tierstep
from tierstep import Tiers

from training_runs import OPTIONS, make_parameters


def make(**options):
    return tierstep.AdamW(make_parameters().items(), **{**OPTIONS, "tiers": Tiers(gpu=0, ram=1 << 20), **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lr=-1.0), "lr=-1.0"),
        (dict(lr=float("nan")), "lr=nan"),
        (dict(betas=(1.0, 0.9)), "betas"),
        (dict(eps=-1e-8), "eps"),
        (dict(weight_decay=-0.1), "weight_decay"),
        (dict(amsgrad=True), "amsgrad=True is not supported"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(options, message):
    with pytest.raises(tierstep.ConfigError, match=message):
        make(**options)


def test_an_empty_parameter_list_is_refused():
    with pytest.raises(tierstep.ConfigError, match="params is empty"):
        tierstep.AdamW([])


def test_a_single_tensor_is_refused():
    with pytest.raises(tierstep.ConfigError, match="single tensor"):
        tierstep.AdamW(torch.zeros(3, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_a_dtype_that_cannot_be_trained_is_refused_by_name(dtype):
    with pytest.raises(tierstep.ConfigError, match=r"parameter odd is torch\.\w+; tierstep trains"):
        tierstep.AdamW([("odd", torch.nn.Parameter(torch.zeros(3, dtype=dtype)))])


def test_two_parameters_of_one_name_are_refused():
    twice = [("w", torch.nn.Parameter(torch.zeros(3))), ("w", torch.nn.Parameter(torch.zeros(3)))]
    with pytest.raises(tierstep.ConfigError, match="name w"):
        tierstep.AdamW(twice)


def test_a_budget_that_is_too_small_is_refused_with_numbers():
    with pytest.raises(tierstep.BudgetError, match=r"the state takes \d+ bytes.*gpu 0 \+ ram 1000"):
        make(tiers=Tiers(gpu=0, ram=1000))


def test_a_budget_beyond_the_machine_is_refused_before_allocation():
    huge = torch.nn.Parameter(torch.empty(1, dtype=torch.bfloat16).expand(1 << 42))
    with pytest.raises(tierstep.ConfigError, match="are free"):
        tierstep.AdamW([("huge", huge)], tiers=Tiers(gpu=0, ram="500TiB", subgroup="1TiB"))


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(tierstep.ConfigError, match="absent"):
        make(tiers=Tiers(gpu=0, ram=1 << 20, nvme=[tmp_path / "absent"]))


def test_a_file_instead_of_a_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(tierstep.ConfigError, match="file"):
        make(tiers=Tiers(gpu=0, ram=1 << 20, nvme=[tmp_path / "file"]))


def test_a_failed_construction_leaves_nothing_behind(tmp_path):
    with pytest.raises(tierstep.BudgetError):
        make(tiers=Tiers(gpu=0, ram=100, nvme=[tmp_path]))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_add_param_group_leaves_the_optimizer_usable():
    parameters = make_parameters()
    optimizer = tierstep.AdamW(parameters.items(), **OPTIONS, tiers=Tiers(gpu=0, ram=16 << 10))
    big = torch.nn.Parameter(torch.zeros(100_000))
    with pytest.raises(tierstep.BudgetError):
        optimizer.add_param_group({"params": [("big", big)]})
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.training_state.shards) == len(parameters)


def test_closing_twice_is_fine(tmp_path):
    optimizer = make(tiers=Tiers(gpu=0, ram=20 << 10, nvme=[tmp_path], subgroup=2000))
    optimizer.close()
    optimizer.close()
    assert list(tmp_path.iterdir()) == []
