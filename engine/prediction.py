"""What a step of a plan will take on a machine whose rates are known, before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstep.engine.adamw.fields import weight_bytes_per_element
from tierstep.engine.performance import Limit, Load, MachineRates, least_seconds
from tierstep.engine.plan import Division, plan_step
from tierstep.engine.planning import MemoryPlan
from tierstep.engine.simulation import Passage, Prediction, simulate


@dataclass(frozen=True)
class Expectation:
    """What the simulation says of a step's lanes in the steady state, what the check of gradients takes before they
    begin, and the least that the rates allow for the lanes."""

    step: Prediction
    check_seconds: float
    limit: Limit

    @property
    def seconds(self) -> float:
        """What the whole step takes."""
        return self.check_seconds + self.step.seconds


def expect_step(plan: MemoryPlan, rates: MachineRates, division: Division | None) -> Expectation:
    """Return what a step over every parameter of `plan` takes, when steps were made before.

    `division` says who updates what; None where there is no GPU. A gradient is taken to have its weight's dtype.
    """
    loads, homes = loads_of(plan), plan.homes
    cold = [index for index, home in enumerate(homes) if home == "nvme"]
    resident = frozenset(cold[: plan.slot_count])  # what a step that went backwards has left in its slots
    step = plan_step(homes, range(len(homes)), resident, plan.slot_count, backwards=False, division=division)
    passage = Passage(plan.device_slot_count or len(homes), plan.staging_count, plan.slot_count)
    return Expectation(
        simulate(step, loads, rates, passage, resident),
        sum(load.gradients for load in loads) / rates.check,
        least_seconds(loads, rates, division, plan.moved_bytes_per_step),
    )


def loads_of(plan: MemoryPlan) -> Sequence[Load]:
    """Return what each subgroup of a plan brings to a step."""
    loads = []
    for subgroup, home in zip(plan.subgroups, plan.homes, strict=True):
        layout = subgroup.layout
        weights = layout.numel * weight_bytes_per_element(layout.fields)
        loads.append(Load(home, layout.padded_nbytes if home == "nvme" else layout.nbytes, weights, weights))
    return loads
