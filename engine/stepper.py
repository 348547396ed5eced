"""One optimizer step from gradients to final weights, and how an interrupted one is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierstep.engine.adamw.formula import Scalars
from tierstep.engine.compute import Compute
from tierstep.engine.gradients import Gradients
from tierstep.engine.pipeline import Pipeline
from tierstep.engine.plan import Division, plan_step
from tierstep.engine.timeline import Timeline
from tierstep.engine.trace import StepReport, Trace, TransferLog
from tierstep.engine.training_state import TrainingState
from tierstep.engine.update import Update
from tierstep.errors import StepInterrupted


@dataclass(frozen=True)
class FinishedStep:
    """What was recorded of a step; summing it up is left to whoever asks."""

    trace: Trace
    seconds: float
    check_seconds: float
    interval_seconds: float


@dataclass
class OpenStep:
    """A step under way: its numbers are fixed when it begins, so finishing it later gives the same bits."""

    update: Update
    steps_after: list[int]
    remaining: set[int] = field(default_factory=set)


class Stepper:
    """Runs steps over a training state. One thread at a time may call it."""

    def __init__(self, state: TrainingState, compute: Compute, log: TransferLog) -> None:
        self._state = state
        self._compute = compute
        self._pipeline = Pipeline(state.store, compute.lanes)
        self.division: Division | None = None
        self._open: OpenStep | None = None
        self._replacing = False
        self._backwards = False
        self._log = log
        self._ended = 0.0
        self._last: FinishedStep | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the last step failed half-way and has not been finished yet."""
        return self._open is not None

    @property
    def report(self) -> StepReport | None:
        """What the last finished step did; None before the first."""
        last = self._last
        if last is None:
            return None
        return last.trace.report(
            seconds=last.seconds, check_seconds=last.check_seconds, interval_seconds=last.interval_seconds
        )

    @property
    def timeline(self) -> Timeline | None:
        """What every lane did in the last finished step; None before the first."""
        return None if self._last is None else self._last.trace.timeline()

    def run(self, gradients: Gradients, scalars: Sequence[Scalars | None], started: float) -> None:
        """Begin a step and finish it. `started` is when the caller began to work on it (perf_counter)."""
        self.require_whole("make a step")
        update = Update(self._state.shards, self._state.subgroups, gradients, scalars)
        touched = set(gradients.touched())
        steps_after = [step + (position in touched) for position, step in enumerate(self._state.steps)]
        self._open = OpenStep(update, steps_after, set(update.touched_subgroups()))
        self._log.trace = Trace()
        self._finish(self._open, started)

    def resume(self, gradients: Gradients, started: float) -> None:
        """Finish the interrupted step. Raises `StepInterrupted` when the gradients are not those it began with."""
        if self._open is None:
            raise ValueError("no step is interrupted")
        if gradients.fingerprint != self._open.update.gradients.fingerprint:
            raise StepInterrupted(
                "the last step failed half-way and the gradients have changed since, so it cannot be finished: "
                "restore a checkpoint (next time, call step() again before anything else)"
            )
        self._finish(self._open, started)

    def require_whole(self, purpose: str) -> None:
        """Raise `StepInterrupted` while a step is unfinished."""
        if self._replacing:
            raise StepInterrupted(f"cannot {purpose}: restoring the state failed half-way; restore a checkpoint")
        if self._open is not None:
            raise StepInterrupted(
                f"cannot {purpose}: the last step failed half-way; call step() again to finish it, "
                f"or restore a checkpoint"
            )

    def replace_state(self, rewrite: Callable[[], None]) -> None:
        """Call `rewrite`, which replaces every record; an interrupted step is forgotten then.

        If it fails half-way, steps are refused until another call succeeds.
        """
        self._open, self._replacing = None, True
        rewrite()
        self._replacing = False

    def close(self) -> None:
        """End the lanes' threads."""
        self._pipeline.close()

    def _finish(self, step: OpenStep, started: float) -> None:
        store, checked = self._state.store, time.perf_counter()
        plan = plan_step(
            store.homes(),
            step.remaining,
            store.resident(),
            store.slots.count,
            backwards=self._backwards,
            division=self.division,
        )
        on_device = [index for index in plan.warm if store.home(index) == "device"]
        processors = self._compute.begin(step.update, on_device, self._log.trace)
        self._pipeline.run(plan, processors, self._log.trace, step.remaining.discard)
        self._commit(step)
        ended = time.perf_counter()
        interval = ended - self._ended if self._ended else 0.0
        self._last = FinishedStep(self._log.trace, ended - started, checked - started, interval)
        self._ended = ended

    def _commit(self, step: OpenStep) -> None:
        self._state.steps[:] = step.steps_after  # the same if it is done twice, after an interruption right here
        self._backwards = not self._backwards
        self._open = None
