"""What a training run tells whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tierstep.engine.planning import MemoryPlan
from tierstep.engine.timeline import Timeline
from tierstep.engine.trace import StepReport

if TYPE_CHECKING:
    from tierstep.results import TrainResult


@dataclass(frozen=True)
class StepTimes:
    """Where the seconds of a step went. Stalls are the part of the update in which a lane waited for files."""

    forward_backward: float = 0.0
    update: float = 0.0
    stall: float = 0.0
    save: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.forward_backward + self.update + self.stall + self.save

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(
            self.forward_backward + other.forward_backward,
            self.update + other.update,
            self.stall + other.stall,
            self.save + other.save,
        )


@dataclass(frozen=True)
class RunStart:
    """A run is about to make its first step. `notices` are sentences that a user should read."""

    first_step: int
    last_step: int
    parameters: int
    plan: MemoryPlan
    resumed_from: Path | None
    notices: tuple[str, ...]


@dataclass(frozen=True)
class StepEvent:
    """A step was made, and saved where `checkpoint` says so. `timeline` has its forward and backward passes, too."""

    step: int
    loss: float
    lr: float
    gradient_norm: float | None
    tokens: int
    times: StepTimes
    report: StepReport
    timeline: Timeline
    checkpoint: Path | None


class Observer(Protocol):
    """Called on the training thread, which waits. What it raises ends the run."""

    def on_start(self, start: RunStart) -> None:
        """Everything is allocated, and restored where there was something to resume."""

    def on_step(self, event: StepEvent) -> None:
        """One more step is complete."""

    def on_end(self, result: TrainResult) -> None:
        """The run has ended, by itself or by a signal; not called after an error."""


class Together:
    """An observer that hands everything to several, in turn."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def on_start(self, start: RunStart) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.on_start(start)

    def on_step(self, event: StepEvent) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.on_step(event)

    def on_end(self, result: TrainResult) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.on_end(result)


class Silent:
    """An observer that does nothing."""

    def on_start(self, start: RunStart) -> None:
        """See `Observer`."""

    def on_step(self, event: StepEvent) -> None:
        """See `Observer`."""

    def on_end(self, result: TrainResult) -> None:
        """See `Observer`."""
