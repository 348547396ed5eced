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

    def link(self, index: int, target: Path) -> bool:
        """Give the record's file a second name, so that its present bytes stay readable there whatever follows.

        Returns False where there is no file, or none that can be linked there. Not while the record is being stored.
        """

    def adopt(self, index: int, source: Path) -> bool:
        """Take the file `source`, which holds a record of the same layout, for the record's own, without a copy.

        Neither is ever written while both names exist. Returns False where that is not possible.
        """

    def close(self) -> None:
        """Give everything back; the records are gone. May be called twice."""


def _completed() -> Completion:
    completion = Completion(Read(Path("memory"), 0, memoryview(bytearray())), timeout_s=0)
    completion.finish()
    return completion


COMPLETED = _completed()
"""The completion of every transfer that needed no I/O and has ended already."""
