"""What training will take, worked out before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tierstep.configs.schema import Tiers
from tierstep.configs.sizes import format_bytes
from tierstep.engine.subgroups import ShardSpec, Subgroup, cut
from tierstep.errors import BudgetError
from tierstep.io.alignment import align_up
from tierstep.io.directories import require_directory
from tierstep.io.failures import free_bytes
from tierstep.tiers.memory import available_bytes
from tierstep.tiers.placement import Budgets, place

DEVICE_SLOTS = 4  # of a GPU: one record each arriving, being updated and leaving, and one that waits
STAGING_BUFFERS = 2  # for weights and gradients on their way to the CPU: one arriving, one in use
STAGING_ALIGNMENT_BYTES = 64
GRADIENT_BYTES = 4  # the most that an element of a gradient takes
AUTOMATIC_RAM_SHARE = 0.8  # of the memory that is free now; the rest is for gradients, activations and other programs
TIERS = ("device", "host", "nvme")


@dataclass(frozen=True)
class FreeBytes:
    """What is free now: host memory, each nvme directory's file system, and the GPU's memory (None without one).

    A file system with several directories counts once.
    """

    host: int
    nvme: tuple[int, ...] = ()
    gpu: int | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """Where every byte of state will be, and what a step will move.

    `weight_bytes` are the model's own trainable weights; gradients take as much again while they exist. Where the
    model is on a GPU (`on_gpu`), records pass through `device_slot_count` slots there, and weights and gradients of
    those that the CPU updates through `staging_count` buffers in host memory.
    """

    subgroups: tuple[Subgroup, ...]
    homes: tuple[str, ...]
    slot_count: int
    slot_nbytes: int
    numel: int
    weight_bytes: int
    on_gpu: bool = False
    device_slot_count: int = 0
    device_slot_nbytes: int = 0
    staging_count: int = 0
    staging_nbytes: int = 0

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
        """Host memory of records, slots and staging buffers together (pinned where there is a GPU)."""
        return self.state_bytes["host"] + self.slots_bytes + self.staging_count * self.staging_nbytes

    @property
    def device_bytes(self) -> int:
        """Memory of the device that records and slots take; host memory where the model is on the CPU."""
        return self.state_bytes["device"] + self.device_slot_count * self.device_slot_nbytes

    @property
    def optimizer_host_bytes(self) -> int:
        """Host memory that the optimizer takes, once every record has been touched."""
        return self.pinned_bytes + (0 if self.on_gpu else self.device_bytes)

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
        return replace(
            later,
            subgroups=self.subgroups + later.subgroups,
            homes=self.homes + later.homes,
            numel=self.numel + later.numel,
            weight_bytes=self.weight_bytes + later.weight_bytes,
        )

    def _nbytes(self, index: int) -> int:
        layout = self.subgroups[index].layout
        return layout.padded_nbytes if self.homes[index] == "nvme" else layout.nbytes


def measure_free(directories: Sequence[Path], gpu: int | None = None) -> FreeBytes:
    """Ask the system what is free now, besides the `gpu` bytes. Raises `ConfigError` for an unusable directory."""
    found = {path: (require_directory(path).stat().st_dev, free_bytes(path)) for path in directories}
    file_systems = dict(reversed([(device, path) for path, (device, _) in found.items()]))  # of several, the first path
    nvme = tuple(free if file_systems[device] == path else 0 for path, (device, free) in found.items())
    return FreeBytes(available_bytes(), nvme, gpu)


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
    passing = Passing.none() if free.gpu is None else _passing(specs, subgroups, tiers, present)
    slots = (0, 0) if present is None else (present.slot_count, present.slot_nbytes)
    placement = place(sizes, padded, _budgets(tiers, free, present, passing), tiers.slots, slots)
    plan = MemoryPlan(
        tuple(subgroups),
        placement.homes,
        placement.slot_count,
        placement.slot_nbytes,
        numel=sum(spec.numel for spec in specs),
        weight_bytes=sum(spec.numel * spec.dtype.itemsize for spec in specs),
        on_gpu=free.gpu is not None,
        device_slot_count=passing.device_count,
        device_slot_nbytes=passing.device_nbytes,
        staging_count=passing.staging_count,
        staging_nbytes=passing.staging_nbytes,
    )
    _check_memory(plan, free)
    return plan


@dataclass(frozen=True)
class Passing:
    """Memory that state, weights and gradients pass through on their way between host and GPU."""

    device_count: int
    device_nbytes: int
    staging_count: int
    staging_nbytes: int

    @classmethod
    def none(cls) -> Passing:
        """Return what a model on the CPU needs, or one whose whole state is in the GPU's memory."""
        return cls(0, 0, 0, 0)

    @property
    def device_bytes(self) -> int:
        """Memory of the GPU."""
        return self.device_count * self.device_nbytes

    @property
    def host_bytes(self) -> int:
        """Host memory."""
        return self.staging_count * self.staging_nbytes


def _passing(
    specs: Sequence[ShardSpec], subgroups: Sequence[Subgroup], tiers: Tiers, present: MemoryPlan | None
) -> Passing:
    taken = 0 if present is None else present.state_bytes["device"]
    state = sum(subgroup.layout.nbytes for subgroup in subgroups)
    if tiers.gpu is not None and state + taken <= tiers.gpu and (present is None or not present.staging_count):
        return Passing.none()
    weight_bytes = {spec.shard: spec.dtype.itemsize for spec in specs}
    record = max([subgroup.layout.nbytes for subgroup in subgroups], default=0)
    staging = max([_staging_nbytes(subgroup, weight_bytes) for subgroup in subgroups], default=0)
    if present is not None:
        record, staging = max(record, present.device_slot_nbytes), max(staging, present.staging_nbytes)
    count = DEVICE_SLOTS if tiers.gpu is None else min(DEVICE_SLOTS, (tiers.gpu - taken) // record)
    if tiers.gpu and not count:
        raise BudgetError(
            f"the gpu budget of {format_bytes(tiers.gpu)} cannot hold one record of {format_bytes(record)}: raise gpu, "
            f"lower subgroup, or set gpu to 0 to have the CPU update everything"
        )
    return Passing(count, record if count else 0, STAGING_BUFFERS, staging)


def _staging_nbytes(subgroup: Subgroup, weight_bytes: Mapping[int, int]) -> int:
    return sum(
        align_up(part.length * weight_bytes[part.shard], STAGING_ALIGNMENT_BYTES)
        + align_up(part.length * GRADIENT_BYTES, STAGING_ALIGNMENT_BYTES)
        for part in subgroup.slices
    )


def _budgets(tiers: Tiers, free: FreeBytes, present: MemoryPlan | None, passing: Passing) -> Budgets:
    automatic_ram = int(free.host * AUTOMATIC_RAM_SHARE)
    host = (automatic_ram if tiers.ram is None else tiers.ram) - passing.host_bytes
    device = (tiers.gpu or 0) - passing.device_bytes
    if present is not None:
        device -= present.state_bytes["device"]
        host -= present.state_bytes["host"] if tiers.ram is not None else 0
    return Budgets(max(0, device), max(0, host), sum(free.nvme))


def _check_memory(plan: MemoryPlan, free: FreeBytes) -> None:
    if plan.optimizer_host_bytes > free.host:
        raise BudgetError(
            f"the plan puts {format_bytes(plan.optimizer_host_bytes)} of state into host memory, but only "
            f"{format_bytes(free.host)} are free: lower ram{'' if plan.on_gpu else ' or gpu'}, or add an nvme directory"
        )
    if free.gpu is not None and plan.device_bytes > free.gpu:
        raise BudgetError(
            f"the plan puts {format_bytes(plan.device_bytes)} into the GPU's memory, of which "
            f"{format_bytes(free.gpu)} are free: lower gpu or subgroup"
        )
