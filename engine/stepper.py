"""One optimizer step from gradients to final weights, and how an interrupted one is finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from tierstep.engine.adamw.formula import Scalars
from tierstep.engine.compute import Compute
from tierstep.engine.gradients import Gradients
from tierstep.engine.overlap import WeightGates
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
    """Runs steps over a training state. One thread at a time may call it.

    A step in the background is waited for by everything that needs it to be over.
    """

    def __init__(self, state: TrainingState, compute: Compute, gates: WeightGates, log: TransferLog) -> None:
        self._state = state
        self._compute = compute
        self._gates = gates
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tierstep-step")
        self._background: Future[None] | None = None
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
        """Whether the last step failed half-way and has not been finished yet. Raises the error that nobody saw yet."""
        self._join()
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

    def run(
        self, gradients: Gradients, scalars: Sequence[Scalars | None], started: float, *, background: bool = False
    ) -> None:
        """Begin a step and finish it, or leave that to the background.

        `started` is when the caller began to work on it (perf_counter).
        """
        self.require_whole("make a step")
        update = Update(self._state.shards, self._state.subgroups, gradients, scalars)
        touched = set(gradients.touched())
        steps_after = [step + (position in touched) for position, step in enumerate(self._state.steps)]
        self._open = OpenStep(update, steps_after, set(update.touched_subgroups()))
        self._log.trace = Trace()
        finish = self._begin(self._open, started)
        if background:
            self._background = self._thread.submit(finish)
        else:
            finish()

    def resume(self, gradients: Gradients, started: float) -> None:
        """Finish the interrupted step. Raises `StepInterrupted` when the gradients are not those it began with.

        Gradients that were cleared do not matter: the step has kept its own.
        """
        if self._open is None:
            raise ValueError("no step is interrupted")
        if gradients.touched() and gradients.fingerprint != self._open.update.gradients.fingerprint:
            raise StepInterrupted(
                "the last step failed half-way and the gradients have changed since, so it cannot be finished: "
                "restore a checkpoint (next time, call step() again before anything else)"
            )
        self._begin(self._open, started)()

    def synchronize(self) -> None:
        """Wait for a step in the background; finish one that failed half-way. Raises what goes wrong."""
        if self.interrupted and self._open is not None:
            self._begin(self._open, time.perf_counter())()

    def enter(self, subgroups: Collection[int]) -> None:
        """Wait until the weights of subgroups are final for the caller's stream. Raises what went wrong in the step."""
        if not self._gates.wait(subgroups):
            self.require_whole("use the weights")

    def require_whole(self, purpose: str) -> None:
        """Wait for a step in the background; raise `StepInterrupted` while one is unfinished."""
        self._join()
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
        wait([self._background] if self._background else [])  # how it ends does not matter any more
        self._background = None
        self._gates.close(())
        self._open, self._replacing = None, True
        rewrite()
        self._replacing = False

    def close(self) -> None:
        """End the threads, after a step that is under way."""
        self._thread.shutdown()
        self._pipeline.close()

    def _join(self) -> None:
        """Wait for a step in the background; raise its error once."""
        background, self._background = self._background, None
        if background is not None:
            background.result()

    def _begin(self, step: OpenStep, started: float) -> Callable[[], None]:
        """Decide what a step does, on the thread whose stream has the gradients; return what does it."""
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
        trace = self._log.trace
        self._gates.close(step.remaining)
        processors = self._compute.begin(step.update, on_device, trace, self._gates.publish)

        def updated(subgroup: int) -> None:
            self._gates.publish(subgroup, None)
            step.remaining.discard(subgroup)

        def finish() -> None:
            try:
                self._pipeline.run(plan, processors, trace, updated)
            except BaseException:
                self._gates.fail()
                raise
            self._commit(step)
            ended = time.perf_counter()
            interval = ended - self._ended if self._ended else 0.0
            self._last = FinishedStep(trace, ended - started, checked - started, interval)
            self._ended = ended

        return finish

    def _commit(self, step: OpenStep) -> None:
        self._state.steps[:] = step.steps_after  # the same if it is done twice, after an interruption right here
        self._backwards = not self._backwards
        self._open = None
