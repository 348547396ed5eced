import math
import pickle
from pathlib import Path

import pytest

from tierstep.configs.schema import Data, Model, Optimizer, Run, Tiers, TrainConfig
from tierstep.configs.section import Section
from tierstep.errors import ConfigError

SECTIONS = (Tiers, Model, Data, Optimizer, Run, TrainConfig)


def test_tiers_take_bytes_or_text():
    tiers = Tiers(gpu="4GiB", ram=2**35, nvme=["/mnt/nvme0", Path("/mnt/nvme1")], subgroup="64MiB")
    assert (tiers.gpu, tiers.ram, tiers.subgroup) == (2**32, 2**35, 2**26)
    assert tiers.nvme == (Path("/mnt/nvme0"), Path("/mnt/nvme1"))


def test_tiers_without_settings_measure_for_themselves():
    assert (Tiers().gpu, Tiers().ram, Tiers().nvme, Tiers().subgroup) == (None, None, (), 2**25)


@pytest.mark.parametrize("one", ["/mnt/nvme0", Path("/mnt/nvme0")])
def test_one_directory_needs_no_list(one):
    assert Tiers(nvme=one).nvme == (Path("/mnt/nvme0"),)


def test_a_home_directory_is_expanded():
    assert Tiers(nvme="~/x").nvme == (Path.home() / "x",)


def test_a_budget_of_zero_switches_a_tier_off_while_another_is_left():
    assert Tiers(gpu=0, ram=0, nvme="/mnt").ram == 0


@pytest.mark.parametrize(
    ("settings", "key", "value", "remedy"),
    [
        ({"gpu": -1}, "gpu", "-1", "write 0"),
        ({"ram": "2000000TiB"}, "ram", "2000000TiB", "is the unit right"),
        ({"ram": "8GiX"}, "ram", "8GiX", "use one of"),
        ({"ram": True}, "ram", "True", "write an integer"),
        ({"ram": float("nan")}, "ram", "nan", "write an integer"),
        ({"nvme": ""}, "nvme", "''", "write it as text"),
        ({"nvme": [""]}, "nvme", "''", "write it as text"),
        ({"nvme": ["a", None]}, "nvme", "None", "write it as text"),
        ({"nvme": 3}, "nvme", "3", "nvme = ['/mnt/nvme0']"),
        ({"nvme": ["a", "./a/"]}, "nvme", "./a/", "name each once"),
        ({"gpu": 0, "ram": 0}, "gpu = 0", "ram = 0", "raise one"),
        ({"subgroup": 0}, "subgroup", "0", "greater than or equal to 1"),
        ({"subgroup": None}, "subgroup", "None", "write an integer"),
        ({"slots": 0}, "slots", "0", "greater than or equal to 1"),
        ({"slots": "4"}, "slots", "'4'", "valid integer"),
        ({"threads": True}, "threads", "True", "valid integer"),
        ({"threads": 1.0}, "threads", "1.0", "valid integer"),
        ({"backend": "spdk"}, "backend", "'spdk'", "'auto', 'threads', 'uring' or 'libaio'"),
        ({"kernel": "fast"}, "kernel", "'fast'", "'auto', 'native' or 'reference'"),
        ({"subgruop": 4096}, "unknown key 'subgruop'", "", "did you mean 'subgroup'"),
        ({"zzz": 4096}, "unknown key 'zzz'", "", "the keys here are gpu, ram, nvme"),
    ],
)
def test_a_wrong_tier_setting_is_refused_with_key_value_and_remedy(settings, key, value, remedy):
    with pytest.raises(ConfigError) as refusal:
        Tiers(**settings)
    assert type(refusal.value) is ConfigError
    assert all(part in str(refusal.value) for part in (key, value, remedy))


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError, match="gpu: -1 .*backend = 'x'.*unknown key 'vram'"):
        Tiers(gpu=-1, backend="x", vram=0)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"tiers": {"gpu": "x"}}, r"^\[tiers\] gpu: 'x' is not an amount"),
        ({"tiers": 3}, "tiers = 3: .*valid dictionary or instance of Tiers"),
        ({"tier": {}}, "unknown key 'tier': did you mean 'tiers'"),
        ({"optimizer": {"lr": "3"}}, r"\[optimizer\] lr = '3': .*valid number"),
        ({"optimizer": {"lr": math.inf}}, r"\[optimizer\] lr = inf: .*finite"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, r"betas.1 = 1.0: .*less than 1"),
        ({"optimizer": {"betas": [0.9]}}, "betas"),
        ({"optimizer": {"schedule": "cosine"}}, "decay_steps = None: the cosine schedule needs the step"),
        ({"optimizer": {"schedule": "linear", "decay_steps": 5, "warmup_steps": 5}}, "decay_steps = 5"),
        ({"model": {"hidden_size": 100, "num_attention_heads": 3}}, "hidden_size = 100 is no multiple"),
        ({"model": {"num_attention_heads": 4, "num_key_value_heads": 3}}, "num_key_value_heads = 3 does not divide"),
        ({"model": {"path": "/m", "hidden_size": 64}}, "brings its own hidden_size: leave"),
        ({"model": {"vocab_size": 255}}, "vocab_size = 255: .*256"),
        ({"model": {"dtype": "float16"}}, "dtype = 'float16': .*'bfloat16' or 'float32'"),
        ({"data": {"sequence_length": 4096}}, "sequence_length = 4096 is more than .* max_position = 2048"),
        ({"data": {"path": ""}}, r"\[data\] path: '' is not a path"),
        ({"run": {"steps": 0}}, "steps = 0"),
        ({"run": {"seed": -1}}, "seed = -1"),
    ],
)
def test_a_wrong_run_setting_is_refused_with_its_section(tables, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**tables)


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(ValueError, match="frozen"):
        Tiers().gpu = 3


def test_tiers_travel_between_processes():
    tiers = Tiers(gpu="4GiB", nvme="/mnt", threads=2)
    assert pickle.loads(pickle.dumps(tiers)) == tiers


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_says_what_it_means(section):
    assert section.__doc__
    assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_sections_are_all_that_a_config_has():
    assert all(issubclass(field.annotation, Section) for field in TrainConfig.model_fields.values())


def test_the_output_folder_is_put_into_nvme_directories():
    config = TrainConfig(tiers={"nvme": ["{output}/nvme", "/mnt"]}, run={"output": "runs/x"})
    assert config.resolved_tiers.nvme == (Path("runs/x/nvme"), Path("/mnt"))
    assert config.resolved_tiers.subgroup == config.tiers.subgroup


def test_the_learning_rate_rises_then_falls_to_its_last_fraction():
    cosine = Optimizer(lr=1.0, warmup_steps=4, schedule="cosine", decay_steps=14, final_lr_fraction=0.1)
    assert [cosine.lr_at(step) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert cosine.lr_at(9) == pytest.approx(0.55)
    assert cosine.lr_at(14) == cosine.lr_at(10**6) == pytest.approx(0.1)
    linear = Optimizer(lr=1.0, schedule="linear", decay_steps=10, final_lr_fraction=0.0)
    assert [linear.lr_at(step) for step in (5, 10, 11)] == [0.5, 0.0, 0.0]
    assert Optimizer(lr=0.5).lr_at(10**9) == 0.5
