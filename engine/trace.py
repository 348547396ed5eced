"""What a step did: events of every lane, and the report made from them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tierstep.engine.timeline import Event, Timeline, busy_seconds

LANES = ("gpu", "cpu", "h2d", "d2h", "read", "write")


@dataclass(frozen=True)
class LaneReport:
    """A lane's share of a step: seconds in which it worked, bytes it moved or updated, pieces of work."""

    seconds: float
    bytes: int
    items: int


@dataclass(frozen=True)
class StepReport:
    """The last step: how long it took and why.

    seconds            wall time of `step()`
    lanes              work per lane: `gpu` and `cpu` update (bytes of state), `h2d` and `d2h` move bytes between host
                       and GPU, `read` and `write` those of files
    stall_seconds      time in which an updating lane waited for a record
    updated            which lane updated which subgroups
    check_seconds      time spent looking for NaN and inf in the gradients, part of `seconds`
    bytes_read         file bytes read, in this step and for it
    bytes_written      file bytes written
    interval_seconds   time since the step before ended (0 for the first), the base of `terabytes_written_per_day`
    """

    seconds: float
    lanes: dict[str, LaneReport]
    stall_seconds: dict[str, float]
    updated: dict[str, tuple[int, ...]]
    check_seconds: float = 0.0
    interval_seconds: float = 0.0

    @property
    def bytes_read(self) -> int:
        """File bytes that the step read."""
        return self.lanes["read"].bytes

    @property
    def bytes_written(self) -> int:
        """File bytes that the step wrote: the drive's wear."""
        return self.lanes["write"].bytes

    @property
    def terabytes_written_per_day(self) -> float:
        """Projected drive wear, if training goes on at the pace of the last step."""
        pace = self.interval_seconds or self.seconds
        return self.bytes_written / pace * 86400 / 1e12 if pace else 0.0


@dataclass
class Trace:
    """Collects events and stalls of one step; any thread may add."""

    events: list[Event] = field(default_factory=list)
    stalls: dict[str, float] = field(default_factory=dict)
    pending: list[Callable[[], Event]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, lane: str, item: int, start: float, end: float, nbytes: int) -> None:
        """Record one piece of work."""
        with self._lock:
            self.events.append(Event(lane, item, start, end, nbytes))

    def add_later(self, event: Callable[[], Event]) -> None:
        """Record one piece of work whose times are asked for when someone wants to know them."""
        with self._lock:
            self.pending.append(event)

    def add_stall(self, lane: str, seconds: float) -> None:
        """Record that a lane waited."""
        with self._lock:
            self.stalls[lane] = self.stalls.get(lane, 0.0) + seconds

    def timeline(self) -> Timeline:
        """Return what was recorded so far."""
        with self._lock:
            self._resolve()
            return Timeline(tuple(self.events))

    def report(self, *, seconds: float, check_seconds: float, interval_seconds: float) -> StepReport:
        """Sum up."""
        with self._lock:
            self._resolve()
            by_lane = {lane: [e for e in self.events if e.lane == lane] for lane in LANES}
            stalls = {lane: self.stalls.get(lane, 0.0) for lane in ("gpu", "cpu")}
        return StepReport(
            seconds=seconds,
            lanes={
                lane: LaneReport(busy_seconds(events), sum(e.nbytes for e in events), len(events))
                for lane, events in by_lane.items()
            },
            stall_seconds=stalls,
            updated={lane: tuple(sorted(e.item for e in by_lane[lane])) for lane in ("gpu", "cpu")},
            check_seconds=check_seconds,
            interval_seconds=interval_seconds,
        )

    def _resolve(self) -> None:
        self.events += [event() for event in self.pending]
        self.pending.clear()


class TransferLog:
    """Where the store reports finished file transfers: sums since the start, and the events of the step under way."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._moved_bytes = {"read": 0, "write": 0}
        self._lock = threading.Lock()

    @property
    def moved_bytes(self) -> dict[str, int]:
        """File bytes read and written since the optimizer was made, checkpoints' reads of slot files included."""
        with self._lock:
            return dict(self._moved_bytes)

    def add(self, lane: str, record: int, start: float, end: float, nbytes: int) -> None:
        """Note a finished transfer; called on the I/O backend's threads."""
        with self._lock:
            self._moved_bytes[lane] += nbytes
        self.trace.add(lane, record, start, end, nbytes)
