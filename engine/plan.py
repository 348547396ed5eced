"""What a step will do, decided before it starts: a pure function, without I/O or tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """The order of one step.

    `cold` subgroups are read in this order, each as soon as a slot is free; the last ones, `keep`, stay in their
    slots. `warm` subgroups lie in memory and are taken from both ends. `write_back` are written back before all else:
    they sit in slots, and this step does not use them.
    """

    cold: tuple[int, ...]
    warm: tuple[int, ...]
    keep: frozenset[int]
    write_back: tuple[int, ...]


def plan_step(
    homes: Sequence[str], touched: Iterable[int], resident: Collection[int], slot_count: int, *, backwards: bool
) -> StepPlan:
    """Plan a step over the `touched` subgroups, given every subgroup's home and who is in a slot now.

    What the last step left in slots comes first, so it is not read again, and as much again is left for the next
    step: with the order alternating (`backwards`), each slot saves one read and one write a step.
    """
    ordered = sorted(touched, reverse=backwards)
    here = set(resident)
    cold = [i for i in ordered if homes[i] == "nvme"]
    cold.sort(key=lambda i: i not in here)  # stable: the residents first, both parts in order
    return StepPlan(
        cold=tuple(cold),
        warm=tuple(sorted((i for i in ordered if homes[i] != "nvme"), key=lambda i: homes[i] != "device")),
        keep=frozenset(cold[max(0, len(cold) - slot_count) :]),
        write_back=tuple(sorted(here.difference(cold))),
    )
