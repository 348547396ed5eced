"""The tiers whose records lie in memory and are updated in place: `device` and `host`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from tierstep.io.alignment import align_up
from tierstep.io.requests import Completion
from tierstep.tiers.record import FIELD_ALIGNMENT_BYTES
from tierstep.tiers.slots import Arena, Slot
from tierstep.tiers.tier import COMPLETED


class ResidentTier:
    """Records in memory, each batch of reservations in one exact-size arena.

    `name` is "host" or "device". Where the model is on the CPU, both are host memory; where it is on a GPU, the host
    tier is pinned and the device tier (with `device`) is the GPU's memory.
    """

    def __init__(self, name: str, *, pinned: bool = False, device: torch.device | None = None) -> None:
        self.name = name
        self._pinned = pinned
        self._device = device
        self._arenas: list[Arena] = []
        self._records: dict[int, torch.Tensor] = {}

    def reserve(self, sizes: Mapping[int, int]) -> None:
        """See `Tier.reserve`. The records are zero at first; unpinned ones take no memory until they are touched."""
        total = sum(align_up(nbytes, FIELD_ALIGNMENT_BYTES) for nbytes in sizes.values())
        if not total:
            return
        if self._device is not None:
            memory = torch.zeros(total, dtype=torch.uint8, device=self._device)
            parts = torch.split(memory, [align_up(nbytes, FIELD_ALIGNMENT_BYTES) for nbytes in sizes.values()])
            self._records |= {index: part[:nbytes] for (index, nbytes), part in zip(sizes.items(), parts, strict=True)}
            return
        arena = Arena(total, pinned=self._pinned)
        self._arenas.append(arena)
        for index, nbytes in sizes.items():
            self._records[index] = arena.cut(nbytes, FIELD_ALIGNMENT_BYTES)[0]

    def view(self, index: int) -> torch.Tensor:
        """See `Tier.view`."""
        return self._records[index]

    def fetch(self, index: int, slot: Slot) -> Completion:
        """See `Tier.fetch`. Copies at once."""
        record = self._records[index]
        slot.tensor[: record.numel()].copy_(record)
        return COMPLETED

    def store(self, index: int, slot: Slot) -> Completion:
        """See `Tier.store`. Copies at once."""
        record = self._records[index]
        record.copy_(slot.tensor[: record.numel()])
        return COMPLETED

    def link(self, index: int, target: Path) -> bool:
        """See `Tier.link`: memory has no file."""
        return False

    def adopt(self, index: int, source: Path) -> bool:
        """See `Tier.adopt`: memory has no file."""
        return False

    def close(self) -> None:
        """See `Tier.close`."""
        self._records.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
