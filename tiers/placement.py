"""Which record lives in which tier: a pure function of sizes and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstep.errors import BudgetError

DEFAULT_SLOTS = 8  # a few each being read, updated and written: with four, reads and writes take turns


@dataclass(frozen=True)
class Budgets:
    """Bytes that records and slots may take in each tier. `nvme` is the free space of its directories."""

    device: int
    host: int
    nvme: int

    @property
    def total(self) -> int:
        """Bytes of all tiers together."""
        return self.device + self.host + self.nvme


@dataclass(frozen=True)
class Placement:
    """The home of every record, in the records' order, and the staging slots that the cold ones need."""

    homes: tuple[str, ...]
    slot_count: int
    slot_nbytes: int

    @property
    def slots_nbytes(self) -> int:
        """Bytes of host memory that the slots take."""
        return self.slot_count * self.slot_nbytes


def place(
    sizes: Sequence[int],
    padded_sizes: Sequence[int],
    budgets: Budgets,
    slots: int | None = None,
    present: tuple[int, int] = (0, 0),
) -> Placement:
    """Fill the device tier first, then the host tier, then files; what is cold passes through slots in host memory.

    `sizes` are the records' bytes in memory, `padded_sizes` in a file. `slots` asks for a number of slots; None takes
    up to eight, fewer where the host budget has no room for more. `present` are (number, bytes) of slots that are
    there already, within the host budget, and may be enlarged. Raises `BudgetError` with the numbers.
    """
    count, nbytes = present
    everything_warm = _fill(sizes, padded_sizes, budgets, slots_nbytes=count * nbytes)
    if everything_warm is not None and "nvme" not in everything_warm:
        return Placement(everything_warm, count, nbytes)
    return _place_with_slots(sizes, padded_sizes, budgets, count or slots, nbytes)


def _place_with_slots(
    sizes: Sequence[int], padded_sizes: Sequence[int], budgets: Budgets, slots: int | None, least_nbytes: int
) -> Placement:
    slot_nbytes = max([least_nbytes, *padded_sizes])
    if budgets.nvme and budgets.host < slot_nbytes * (slots or 1):
        raise BudgetError(
            f"the ram budget of {budgets.host} bytes cannot hold {slots or 1} staging slot(s) of {slot_nbytes} bytes, "
            f"one record each: raise ram, or lower subgroup"
        )
    affordable = budgets.host // slot_nbytes if slot_nbytes else 0
    count = slots or min(DEFAULT_SLOTS, affordable)
    homes = _fill(sizes, padded_sizes, budgets, slots_nbytes=count * slot_nbytes) if budgets.nvme else None
    if homes is None:
        raise BudgetError(_refusal(sizes, budgets, count * slot_nbytes if budgets.nvme else 0))
    cold = [padded for padded, home in zip(padded_sizes, homes, strict=True) if home == "nvme"]
    if least_nbytes:
        return Placement(homes, count, max([least_nbytes, *cold]))
    return Placement(homes, min(count, len(cold)), max(cold, default=0))


def _fill(
    sizes: Sequence[int], padded_sizes: Sequence[int], budgets: Budgets, slots_nbytes: int
) -> tuple[str, ...] | None:
    left = {"device": budgets.device, "host": budgets.host - slots_nbytes, "nvme": budgets.nvme}
    homes = []
    for nbytes, padded in zip(sizes, padded_sizes, strict=True):
        need = {"device": nbytes, "host": nbytes, "nvme": padded}
        home = next((tier for tier in left if need[tier] <= left[tier]), None)
        if home is None:
            return None
        left[home] -= need[home]
        homes.append(home)
    return tuple(homes)


def _refusal(sizes: Sequence[int], budgets: Budgets, slots_nbytes: int) -> str:
    return (
        f"the state takes {sum(sizes)} bytes in {len(sizes)} records of up to {max(sizes)}, but the budgets hold "
        f"gpu {budgets.device} + ram {budgets.host} (of which staging {slots_nbytes}) + nvme {budgets.nvme} bytes: "
        f"raise a budget, or add an nvme directory with free space"
    )
