"""Opening the tiers that a configuration asks for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from tierstep.configs.schema import Tiers
from tierstep.io.backend import IoBackend
from tierstep.io.directories import require_directory
from tierstep.io.scratch import open_scratch
from tierstep.io.selection import open_backend
from tierstep.tiers.nvme import NvmeTier
from tierstep.tiers.resident import ResidentTier
from tierstep.tiers.slots import SlotPool
from tierstep.tiers.store import OnTransfer, Store
from tierstep.tiers.striping import measure_rates
from tierstep.tiers.tier import Tier


def open_store(settings: Tiers, device: torch.device, resources: ExitStack, on_transfer: OnTransfer) -> Store:
    """Open an empty store without slots for parameters on `device`.

    `resources` closes it, its backend and its scratch directories, in order.
    """
    tiers: dict[str, Tier] = {"device": ResidentTier("device"), "host": ResidentTier("host")}
    if device.type != "cpu":
        tiers = {"device": ResidentTier("device", device=device), "host": ResidentTier("host", pinned=True)}
    if settings.nvme:
        backend, folders = open_files(settings, resources)
        tiers["nvme"] = NvmeTier(folders, backend, measure_rates(backend, folders))
    store = Store(tiers, SlotPool(0, 0), on_transfer, settings.verify)
    resources.callback(store.close)
    return store


def as_tensor(memory: memoryview) -> torch.Tensor:
    """Wrap writable bytes in a tensor of uint8 that shares them."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def open_files(settings: Tiers, resources: ExitStack) -> tuple[IoBackend, list[Path]]:
    """Open the I/O backend and a scratch directory in each nvme directory; `resources` closes them."""
    directories = [require_directory(path) for path in settings.nvme]
    backend = open_backend(settings.backend, directories=directories, as_tensor=as_tensor)
    resources.callback(backend.close)
    folders = []
    for directory in settings.nvme:
        scratch = open_scratch(directory)
        resources.callback(scratch.close)
        folders.append(scratch.path)
    return backend, folders
