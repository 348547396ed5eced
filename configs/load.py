"""From a TOML file, or a preset's name, to a checked configuration."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstep.configs.schema import TrainConfig
from tierstep.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRESETS = Path(__file__).parent


def load_config(source: str | Path, overrides: Mapping[str, object] | None = None) -> TrainConfig:
    """Read a configuration and check it. Blocks on one small file.

    `source` is a TOML file, or the bare name of a preset. `overrides` maps dotted keys such as "run.steps" to values
    that replace the file's. Raises `ConfigError`: the file is missing or no TOML, a key is unknown, a value is wrong.
    """
    path = find_config(source)
    tables = _read_tables(path)
    for key, value in (overrides or {}).items():
        _override(tables, key, value)
    try:
        return TrainConfig(**tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def find_config(source: str | Path) -> Path:
    """Return the file that `source` means; a file of that name goes before a preset."""
    path = Path(source)
    if path.is_file():
        return path
    preset = PRESETS / f"{path}.toml"
    if path.parent == Path() and not path.suffix and preset.is_file():
        return preset
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a TOML file in it")
    near = difflib.get_close_matches(path.stem, preset_names(), n=1)
    advice = f"did you mean the preset {near[0]!r}? " if near else ""
    raise ConfigError(f"{path} does not exist: {advice}presets are {', '.join(preset_names())}")


def preset_names() -> list[str]:
    """Return the names of the presets that came with the package, sorted."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def parse_override(text: str) -> tuple[str, object]:
    """Split "run.steps=50" into its key and its value, read as TOML; what is no TOML is text.

    Raises `ConfigError` when the text has another form.
    """
    key, equals, value = text.partition("=")
    if not equals or len(key.split(".")) != 2:
        raise ConfigError(f"{text!r} sets nothing: write section.key=value, such as run.steps=50")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
    return key.strip(), parsed["value"] if len(parsed) == 1 else value


def _read_tables(path: Path) -> dict[str, Any]:
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; correct that line") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8: is it a TOML file?") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    return tables


def _override(tables: dict[str, Any], key: str, value: object) -> None:
    section, _, name = key.partition(".")
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} = {table!r} is no table: write it as [{section}]")
    table[name] = value
