"""What was measured is found again, and a cache that cannot be used is as good as none."""

import json

import pytest

from tierstep.errors import ConfigError
from tierstep.io.calibration_cache import cache_path, read_section, write_entry


def test_entries_are_found_again_in_their_section():
    write_entry("drives", "a", {"rate": 1.5})
    write_entry("drives", "b", {"rate": 2})
    write_entry("compute", "a", {"cores": [0, 1]})
    write_entry("drives", "b", {"other": None})
    assert read_section("drives") == {"a": {"rate": 1.5}, "b": {"other": None}}
    assert read_section("compute") == {"a": {"cores": [0, 1]}}
    assert read_section("nothing") == {}


def test_the_file_says_what_it_is():
    assert write_entry("drives", "a", {"rate": 1.5}) == cache_path()
    document = json.loads(cache_path().read_text())
    assert document == {"format": "tierstep-calibration", "version": 1, "sections": {"drives": {"a": {"rate": 1.5}}}}
    assert [path.name for path in cache_path().parent.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\xff",
        '{"format": "tierstep-calibration", "version": 2, "sections": {"drives": {"a": {}}}}',
        '{"format": "other", "version": 1, "sections": {"drives": {"a": {}}}}',
        '{"format": "tierstep-calibration", "version": 1, "sections": []}',
        '{"format": "tierstep-calibration", "version": 1, "sections": {"drives": ["a"]}}',
        '{"format": "tierstep-calibration", "version": 1, "sections": {"drives": {"a": 3}}}',
    ],
)
def test_a_damaged_or_foreign_cache_is_none_and_gives_way(text):
    cache_path().parent.mkdir(parents=True, exist_ok=True)
    cache_path().write_text(text, encoding="latin-1")
    assert read_section("drives") == {}
    write_entry("drives", "b", {"rate": 1})
    assert read_section("drives") == {"b": {"rate": 1}}


@pytest.mark.parametrize("value", [None, "", "relative/path"])
def test_without_a_usable_variable_the_cache_is_under_home(monkeypatch, tmp_path, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME") if value is None else monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_path() == tmp_path / ".cache/tierstep/calibration.json"


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert read_section("drives") == {}
    with pytest.raises(ConfigError, match=f"folder {tmp_path}/file/tierstep cannot be made .*XDG_CACHE_HOME"):
        write_entry("drives", "a", {})
