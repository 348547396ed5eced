"""How commands write: tables to a console, values as one line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def console(*, quiet: bool = False) -> Console:
    """Return where people read: as wide as the terminal; elsewhere wide enough for whole lines."""
    return Console(quiet=quiet, width=None if sys.stdout.isatty() else 120)


def write_json(values: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(values, default=str) + "\n")
    sys.stdout.flush()
