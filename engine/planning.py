"""What training will take, worked out before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstep.configs.schema import Tiers
from tierstep.configs.sizes import format_bytes
from tierstep.engine.subgroups import ShardSpec, Subgroup, cut
from tierstep.errors import BudgetError
from tierstep.io.directories import require_directory
from tierstep.io.failures import free_bytes
from tierstep.tiers.memory import available_bytes
from tierstep.tiers.placement import Budgets, place

AUTOMATIC_RAM_SHARE = 0.8  # of the memory that is free now; the rest is for gradients, activations and other programs
TIERS = ("device", "host", "nvme")


@dataclass(frozen=True)
class FreeBytes:
    """What is free now: host memory, and each nvme directory's file system."""

    host: int
    nvme: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """Where every byte of state will be, and what a step will move.

    `weight_bytes` are the model's own trainable weights; gradients take as much again while they exist.
    """

    subgroups: tuple[Subgroup, ...]
    homes: tuple[str, ...]
    slot_count: int
    slot_nbytes: int
    numel: int
    weight_bytes: int

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes of records per tier; files count whole pages."""
        return {tier: sum(self._nbytes(i) for i, home in enumerate(self.homes) if home == tier) for tier in TIERS}

    @property
    def slots_bytes(self) -> int:
        """Host memory of the staging slots."""
        return self.slot_count * self.slot_nbytes

    @property
    def pinned_bytes(self) -> int:
        """Host memory that records and slots take together (pinned where there is a GPU)."""
        return self.state_bytes["host"] + self.slots_bytes

    @property
    def optimizer_host_bytes(self) -> int:
        """Host memory that the optimizer takes, once every record has been touched."""
        return self.pinned_bytes + self.state_bytes["device"]

    @property
    def disk_bytes(self) -> int:
        """Bytes of slot files, allocated at the start."""
        return self.state_bytes["nvme"]

    @property
    def moved_bytes_per_step(self) -> int:
        """File bytes that a step reads, and as many that it writes, when every parameter has a gradient.

        What the last step left in slots is neither read nor written.
        """
        cold = sorted((self._nbytes(i) for i, home in enumerate(self.homes) if home == "nvme"), reverse=True)
        return sum(cold[self.slot_count :])

    def joined_by(self, later: MemoryPlan) -> MemoryPlan:
        """Return the plan of all parameters, after those of `later` have joined and brought its slots."""
        return MemoryPlan(
            self.subgroups + later.subgroups,
            self.homes + later.homes,
            later.slot_count,
            later.slot_nbytes,
            self.numel + later.numel,
            self.weight_bytes + later.weight_bytes,
        )

    def _nbytes(self, index: int) -> int:
        layout = self.subgroups[index].layout
        return layout.padded_nbytes if self.homes[index] == "nvme" else layout.nbytes


def measure_free(directories: Sequence[Path]) -> FreeBytes:
    """Ask the system what is free now. Raises `ConfigError` for a directory that is missing or not writable."""
    return FreeBytes(available_bytes(), tuple(free_bytes(require_directory(path)) for path in directories))


def plan_memory(
    specs: Sequence[ShardSpec], tiers: Tiers, free: FreeBytes, present: MemoryPlan | None = None
) -> MemoryPlan:
    """Cut parameters into subgroups and give each a home within the budgets.

    `present` is the plan that already stands, when parameters join later: its bytes are taken from the budgets, and
    its slots are used. Raises `BudgetError` with the numbers when the state does not fit.
    """
    subgroups = cut(specs, tiers.subgroup)
    sizes = [subgroup.layout.nbytes for subgroup in subgroups]
    padded = [subgroup.layout.padded_nbytes for subgroup in subgroups]
    slots = (0, 0) if present is None else (present.slot_count, present.slot_nbytes)
    placement = place(sizes, padded, _budgets(tiers, free, present), tiers.slots, slots)
    plan = MemoryPlan(
        tuple(subgroups),
        placement.homes,
        placement.slot_count,
        placement.slot_nbytes,
        numel=sum(spec.numel for spec in specs),
        weight_bytes=sum(spec.numel * spec.dtype.itemsize for spec in specs),
    )
    _check_memory(plan, free)
    return plan


def _budgets(tiers: Tiers, free: FreeBytes, present: MemoryPlan | None) -> Budgets:
    automatic_ram = int(free.host * AUTOMATIC_RAM_SHARE)
    nvme = min(free.nvme) * len(free.nvme) if free.nvme else 0
    host = automatic_ram if tiers.ram is None else tiers.ram
    device = tiers.gpu or 0
    if present is not None:
        device -= present.state_bytes["device"]
        host -= present.state_bytes["host"] if tiers.ram is not None else 0
    return Budgets(max(0, device), max(0, host), nvme)


def _check_memory(plan: MemoryPlan, free: FreeBytes) -> None:
    if plan.optimizer_host_bytes > free.host:
        raise BudgetError(
            f"the plan puts {format_bytes(plan.optimizer_host_bytes)} of state into host memory, but only "
            f"{format_bytes(free.host)} are free: lower ram or gpu, or add an nvme directory"
        )
