"""What a training run came to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierstep.engine.planning import MemoryPlan
from tierstep.engine.trace import LANES, LaneReport, StepReport
from tierstep.observer import StepEvent, StepTimes

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class TrainResult:
    """How a run, or this part of it, ended.

    first_step         the first step of this part; 1 unless resumed
    steps              steps the run has made in all
    losses             losses of this part, from `first_step` on
    checkpoint         the newest checkpoint
    stopped_by         the signal that ended it early, or None
    plan               where the state was
    report             what the last step did; None if there was none
    lanes, stalls      work and waiting of each lane, summed over this part
    times              where the seconds of the steps went, summed over this part
    tokens             tokens trained on in this part
    moved_bytes        slot-file bytes read and written, checkpoints' reads included
    peak_rss_bytes     the most memory that this process ever had resident
    """

    first_step: int
    steps: int
    losses: tuple[float, ...]
    checkpoint: Path
    stopped_by: int | None
    plan: MemoryPlan
    report: StepReport | None
    lanes: dict[str, LaneReport]
    stalls: dict[str, float]
    times: StepTimes
    tokens: int
    moved_bytes: dict[str, int]
    peak_rss_bytes: int

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes of state in each tier."""
        return self.plan.state_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, saves included; 0 when no step was made."""
        return self.tokens / self.times.total if self.times.total else 0.0

    @property
    def bytes_written_per_step(self) -> float:
        """File bytes that a step wrote on average: the drive's wear, checkpoints apart."""
        return self.lanes["write"].bytes / len(self.losses) if self.losses else 0.0

    @property
    def terabytes_written_per_day(self) -> float:
        """Projected drive wear at the pace of this part."""
        seconds = self.times.total
        return self.lanes["write"].bytes / seconds * SECONDS_PER_DAY / 1e12 if seconds else 0.0


class Totals:
    """Adds up the steps of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tokens = 0
        self.times = StepTimes()
        self.lanes = {lane: LaneReport(0.0, 0, 0) for lane in LANES}
        self.stalls: dict[str, float] = {}
        self.report: StepReport | None = None

    def add(self, event: StepEvent) -> None:
        """Add one step."""
        self.losses.append(event.loss)
        self.tokens += event.tokens
        self.times += event.times
        self.report = event.report
        self.lanes = {lane: _sum(self.lanes[lane], event.report.lanes[lane]) for lane in LANES}
        for lane, seconds in event.report.stall_seconds.items():
            self.stalls[lane] = self.stalls.get(lane, 0.0) + seconds


def _sum(a: LaneReport, b: LaneReport) -> LaneReport:
    return LaneReport(a.seconds + b.seconds, a.bytes + b.bytes, a.items + b.items)
