"""Amounts of bytes, as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

from tierstep.errors import ConfigError

MAX_BYTES = 2**60
UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BY_LOWER_CASE = {unit.lower(): nbytes for unit, nbytes in UNITS.items()}
_AMOUNT = re.compile(r"(?P<number>-?\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)", re.ASCII | re.IGNORECASE)
_REMEDY = 'write an integer number of bytes, or a number with a unit, such as "512MiB", "1.5GiB" or "10GB"'


def parse_bytes(amount: object) -> int:
    """Return a number of bytes, given as an int or as text such as "1.5GiB"; parts of a byte are dropped.

    Units are B, KB to TB (powers of 1000) and KiB to TiB (powers of 1024), in any case. Raises `ConfigError`, which
    names the value and the remedy, for everything else, for negative amounts and for more than 2^60 bytes.
    """
    if isinstance(amount, bool) or not isinstance(amount, int | str):
        raise ConfigError(f"{amount!r} is not an amount of bytes: {_REMEDY}")
    nbytes = amount if isinstance(amount, int) else _parse_text(amount)
    if nbytes < 0:
        raise ConfigError(f"{amount!r} is negative: write 0 to have none, or a positive amount")
    if nbytes > MAX_BYTES:
        raise ConfigError(f"{amount!r} is more than 2^60 bytes, which no machine has: is the unit right?")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Return `nbytes` for people: in the largest binary unit that it fills, with at most two decimals."""
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if abs(nbytes) >= UNITS[unit]), "B")
    number = f"{nbytes / UNITS[unit]:.2f}".rstrip("0").rstrip(".")
    return f"{number} {unit}"


def _parse_text(text: str) -> int:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not an amount of bytes: {_REMEDY}")
    size = _BY_LOWER_CASE.get(match["unit"].lower() or "b")
    if size is None:
        raise ConfigError(f"{text!r} has the unknown unit {match['unit']!r}: use one of {', '.join(UNITS)}")
    if len(match["number"]) > 40:  # longer than any amount in range; int() and Decimal would take it literally
        raise ConfigError(f"{text!r} is not a sensible amount of bytes: {_REMEDY}")
    return int(Decimal(match["number"]) * size)
