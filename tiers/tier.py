"""What a tier promises, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from tierstep.io.requests import Completion, Read
from tierstep.tiers.slots import Slot


class Tier(Protocol):
    """A place where records live. Any thread may call; two calls for the same record do not overlap."""

    name: str

    def reserve(self, sizes: Mapping[int, int]) -> None:
        """Make room for records, given as {index: bytes}; their content is undefined until the first store.

        Raises before anything is kept when there is no room.
        """

    def view(self, index: int) -> torch.Tensor | None:
        """Return the record in place as uint8, when the processors can work on it there; None otherwise."""

    def fetch(self, index: int, slot: Slot) -> Completion:
        """Start copying the record into the first bytes of `slot`."""

    def store(self, index: int, slot: Slot) -> Completion:
        """Start copying the first bytes of `slot` into the record."""

    def close(self) -> None:
        """Give everything back; the records are gone. May be called twice."""


def completed(what: str) -> Completion:
    """Return the completion of a transfer that needed no I/O and has ended already."""
    completion = Completion(Read(Path(what), 0, memoryview(bytearray())), timeout_s=0)
    completion.finish()
    return completion
