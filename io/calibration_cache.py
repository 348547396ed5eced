"""What was measured once about this machine, kept between runs: one JSON file of sections (docs/formats.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstep.errors import ConfigError
from tierstep.io.durable import write_durably

FORMAT = "tierstep-calibration"
VERSION = 1

Entry = Mapping[str, Any]


def cache_path() -> Path:
    """Return where the cache is: `$XDG_CACHE_HOME/tierstep/calibration.json`, under `~/.cache` without it."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "tierstep" / "calibration.json"


def read_section(section: str) -> dict[str, Entry]:
    """Return the entries of a section by key; none where the file is missing, damaged, or of another version.

    What is in the cache makes things faster and nothing else, so a cache that cannot be used is as good as none.
    """
    found = _read().get(section, {})
    return {key: entry for key, entry in found.items() if isinstance(entry, dict)} if isinstance(found, dict) else {}


def write_entry(section: str, key: str, entry: Entry) -> Path:
    """Put an entry of JSON values into a section, in place of the former one; return the cache's path. Blocks.

    A reader sees the old file or the new one. Of two processes that write at the same time, one may lose its entry.
    Raises `ConfigError` where the folder cannot be made, and as `write_durably` does.
    """
    path, sections = cache_path(), _read()
    sections[section] = {**read_section(section), key: dict(entry)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {path.parent} cannot be made ({error.strerror}): set XDG_CACHE_HOME to a writable one"
        ) from error
    document = {"format": FORMAT, "version": VERSION, "sections": sections}
    write_durably(path, json.dumps(document, indent=1, sort_keys=True).encode())
    return path


def _read() -> dict[str, Any]:
    try:
        document = json.loads(cache_path().read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (FORMAT, VERSION):
        return {}
    sections = document.get("sections")
    return sections if isinstance(sections, dict) else {}
