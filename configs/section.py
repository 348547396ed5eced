"""The base of every group of settings: frozen, strict, and refusing in one voice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from tierstep.errors import ConfigError


class Section(BaseModel):
    """A frozen group of settings.

    Whatever is wrong with the values is one `ConfigError` that names each key, its value and the remedy; values are
    taken strictly (no text for numbers, no true for 1), and unknown keys are refused.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    def __init__(self, **values: object) -> None:
        """Check `values`. Raises `ConfigError`."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_refusals(type(self), error))) from None


def _refusals(section: type[Section], error: ValidationError) -> list[str]:
    """Return one sentence for each thing that is wrong."""
    return [_refusal(section, details) for details in error.errors(include_url=False)]


def _refusal(section: type[Section], details: ErrorDetails) -> str:
    key = ".".join(str(part) for part in details["loc"] if not _is_branch_name(part))
    cause = details.get("ctx", {}).get("error")
    if details["type"] == "extra_forbidden":
        return unknown_key(key, section.model_fields)
    if details["type"] == "missing":
        return f"{key}: this key is missing, and it has no default"
    if isinstance(cause, ConfigError):
        return _within(key, section, str(cause))
    return f"{key} = {details['input']!r}: {details['msg']}"


def _within(key: str, section: type[Section], message: str) -> str:
    """Say in which key of which section a refusal arose that already has its own words."""
    if not key:
        return message
    field = section.model_fields.get(key)
    kind = None if field is None else field.annotation
    return f"[{key}] {message}" if isinstance(kind, type) and issubclass(kind, Section) else f"{key}: {message}"


def _is_branch_name(part: int | str) -> bool:
    """Say whether pydantic added this part of a location itself (`function-before[...]`, `literal[...]`)."""
    return isinstance(part, str) and "[" in part


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the refusal of a key that does not exist, with the nearest one that does."""
    names = list(known)
    near = difflib.get_close_matches(key, names, n=1)
    advice = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown key {key!r}: {advice}the keys here are {', '.join(names)}"
