"""What a step will do, decided before it starts: a pure function, without I/O or tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Division:
    """Who may update what, where a GPU and the CPU work on the same state.

    `schedule` is one of "greedy" (both, from the two ends until they meet), "stride" (the GPU every `stride`-th
    subgroup, the CPU the others: Deep Optimizer States, arXiv:2410.21316), "cpu" and "gpu". Whatever it is, records of
    the device tier are updated where they are, by the GPU.
    """

    schedule: str = "greedy"
    stride: int = 2

    def lanes(self, on_device: Iterable[int], elsewhere: Iterable[int]) -> dict[int, str]:
        """Return the lane of every subgroup that is not free to go to either."""
        bound = dict.fromkeys(on_device, "gpu")
        for place, subgroup in enumerate(elsewhere, start=1):
            if self.schedule == "stride":
                bound[subgroup] = "cpu" if place % self.stride else "gpu"
            elif self.schedule != "greedy":
                bound[subgroup] = self.schedule
        return bound


@dataclass(frozen=True)
class StepPlan:
    """The order of one step.

    `cold` subgroups are read in this order, each as soon as a slot is free; the last ones, `keep`, stay in their
    slots. `warm` subgroups lie in memory and are taken from both ends. `write_back` are written back before all else:
    they sit in slots, and this step does not use them. A subgroup that is `bound` is updated by that lane only.
    """

    cold: tuple[int, ...]
    warm: tuple[int, ...]
    keep: frozenset[int]
    write_back: tuple[int, ...]
    bound: Mapping[int, str] = field(default_factory=dict)


def plan_step(
    homes: Sequence[str],
    touched: Iterable[int],
    resident: Collection[int],
    slot_count: int,
    *,
    backwards: bool,
    division: Division | None = None,
) -> StepPlan:
    """Plan a step over the `touched` subgroups, given every subgroup's home and who is in a slot now.

    What the last step left in slots comes first, so it is not read again, and as much again is left for the next
    step: with the order alternating (`backwards`), each slot saves one read and one write a step. Warm subgroups keep
    their order, in which the next forward pass wants them. `division` binds subgroups to lanes; None leaves all free.
    """
    ordered = sorted(touched)
    here = set(resident)
    cold = [i for i in (reversed(ordered) if backwards else ordered) if homes[i] == "nvme"]
    cold.sort(key=lambda i: i not in here)  # stable: the residents first, both parts in order
    warm = [i for i in ordered if homes[i] == "device"], [i for i in ordered if homes[i] == "host"]
    return StepPlan(
        cold=tuple(cold),
        warm=tuple(warm[0] + warm[1]),
        keep=frozenset(cold[max(0, len(cold) - slot_count) :]),
        write_back=tuple(sorted(here.difference(cold))),
        bound={} if division is None else division.lanes(warm[0], warm[1] + cold),
    )
