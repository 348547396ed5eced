import os
from pathlib import Path

import pytest

from tierstep.configs.load import find_config, load_config, parse_override, preset_names
from tierstep.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_there_is_a_preset_for_each_kind_of_machine():
    assert preset_names() == ["cpu-laptop", "cpu-server-nvme", "quickstart"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_and_begins_by_saying_what_it_is_for(name):
    config = load_config(name)
    assert config.run.output == Path("runs") / config.run.output.name
    assert find_config(name).read_text().startswith("# ")


def test_the_quickstart_forces_all_three_tiers():
    tiers = load_config("quickstart").tiers
    assert tiers.gpu
    assert tiers.ram
    assert tiers.nvme


def test_an_empty_file_is_all_defaults(write):
    assert load_config(write("")).run.steps == 100


def test_a_file_goes_before_a_preset_of_its_name(write, monkeypatch):
    path = write("[run]\nsteps = 7")
    monkeypatch.chdir(path.parent)
    path.rename("quickstart")
    assert load_config("quickstart").run.steps == 7


def test_overrides_replace_what_the_file_says(write):
    path = write("[run]\nsteps = 7\nseed = 3")
    config = load_config(path, {"run.steps": 9, "data.batch_size": 2})
    assert (config.run.steps, config.run.seed, config.data.batch_size) == (9, 3, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nsteps = = 3", "run.toml is not valid TOML: .*line 2.*correct"),
        ("[run]\nsteps = 'x'", r"run.toml: \[run\] steps = 'x': .*valid integer"),
        ("[run]\nstep = 3", "unknown key 'step': did you mean 'steps'"),
        ("[runs]\nsteps = 3", "unknown key 'runs': did you mean 'run'"),
        ("run = 3", "run = 3: .*dictionary"),
        (b"\xff\xfe", "not text in UTF-8"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_a_remedy(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(text))


def test_a_missing_file_is_refused_with_the_presets_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"quickstrat.toml does not exist: did you mean the preset 'quickstart'"):
        load_config(tmp_path / "quickstrat.toml")


def test_a_folder_is_no_config(tmp_path):
    with pytest.raises(ConfigError, match="is a folder: name a TOML file"):
        load_config(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(write):
    path = write("")
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load_config(path)


def test_an_override_of_something_that_is_no_table_is_refused(write):
    with pytest.raises(ConfigError, match=r"run = 3 is no table: write it as \[run\]"):
        load_config(write("run = 3"), {"run.steps": 4})


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("run.steps=50", "run.steps", 50),
        ("optimizer.lr = 3e-4", "optimizer.lr", 3e-4),
        ("tiers.ram=8GiB", "tiers.ram", "8GiB"),
        ('tiers.nvme=["/a", "/b"]', "tiers.nvme", ["/a", "/b"]),
        ("model.tie_word_embeddings=true", "model.tie_word_embeddings", True),
        ("data.path=a=b", "data.path", "a=b"),
        ("data.path=1\nx = 2", "data.path", "1\nx = 2"),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_text(text, key, value):
    assert parse_override(text) == (key, value)


@pytest.mark.parametrize("text", ["run.steps", "steps=3", "a.b.c=3", "=3"])
def test_an_override_of_another_form_is_refused(text):
    with pytest.raises(ConfigError, match="write section.key=value"):
        parse_override(text)
