"""A timeline: what every lane did in one step and when, as a file for trace viewers and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

LANE_ORDER = ("forward", "backward", "gpu", "cpu", "h2d", "d2h", "read", "write")
PASSES = ("forward", "backward")  # their items are micro-batches, those of the other lanes subgroups
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Event:
    """One piece of work of a lane: on what, when (seconds, perf_counter) and how many bytes.

    `item` is the number of a subgroup, or of a micro-batch in the lanes `forward` and `backward`.
    """

    lane: str
    item: int
    start: float
    end: float
    nbytes: int

    @property
    def name(self) -> str:
        """What was worked on, in words."""
        return f"{'micro-batch' if self.lane in PASSES else 'subgroup'} {self.item}"


@dataclass(frozen=True)
class Row:
    """One lane's events, in the order of their starts, on as many tracks as run at once: `tracks[i]` is event i's."""

    lane: str
    events: tuple[Event, ...]
    tracks: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Number of tracks."""
        return max(self.tracks) + 1

    @property
    def busy_seconds(self) -> float:
        """Time in which the lane worked."""
        return busy_seconds(self.events)

    @property
    def nbytes(self) -> int:
        """Bytes that the lane moved or updated."""
        return sum(event.nbytes for event in self.events)


@dataclass(frozen=True)
class Timeline:
    """The events of one step, all lanes together. Times are seconds of `time.perf_counter`."""

    events: tuple[Event, ...]

    def joined_by(self, events: Iterable[Event]) -> Timeline:
        """Return this timeline with further events, such as those of forward and backward."""
        return Timeline((*self.events, *events))

    @cached_property
    def start(self) -> float:
        """When the first event began."""
        return min((event.start for event in self.events), default=0.0)

    @cached_property
    def seconds(self) -> float:
        """From the first event's start to the last one's end."""
        return max((event.end for event in self.events), default=0.0) - self.start

    def rows(self) -> list[Row]:
        """Return the lanes that did anything, in the order of `LANE_ORDER`; lanes unknown there come last."""
        lanes = sorted({event.lane for event in self.events}, key=_place)
        return [_row(lane, [event for event in self.events if event.lane == lane]) for lane in lanes]

    def save_json(self, path: Path | str) -> None:
        """Write the timeline as Chrome trace JSON, which ui.perfetto.dev and chrome://tracing show. Blocks."""
        Path(path).write_text(json.dumps({"traceEvents": _chrome_events(self), "displayTimeUnit": "ms"}))

    def save_png(self, path: Path | str, title: str = "") -> None:
        """Draw the timeline, a row for each lane. Blocks. Raises `ConfigError` where Pillow is not installed."""
        from tierstep.engine.picture import draw_timeline

        draw_timeline(self, title).save(path)


def busy_seconds(events: Iterable[Event]) -> float:
    """Return the time in which at least one of the events was under way."""
    busy, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.start):
        busy += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return busy


def _place(lane: str) -> tuple[int, str]:
    return (LANE_ORDER.index(lane) if lane in LANE_ORDER else len(LANE_ORDER)), lane


def _row(lane: str, events: Sequence[Event]) -> Row:
    """Give each event the lowest track that is free when it starts."""
    ordered = sorted(events, key=lambda event: (event.start, event.end))
    free_from: list[float] = []
    tracks = []
    for event in ordered:
        track = next((i for i, end in enumerate(free_from) if end <= event.start), len(free_from))
        free_from[track : track + 1] = [event.end]
        tracks.append(track)
    return Row(lane, tuple(ordered), tuple(tracks))


def _chrome_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return complete events ("X") and the names of their threads ("M"): a thread for each track, since events of one
    thread must not overlap."""
    found: list[dict[str, Any]] = []
    threads = 0
    for row in timeline.rows():
        found += [_thread_name(threads + track, row.lane) for track in range(row.depth)]
        found += [
            {
                "ph": "X",
                "name": event.name,
                "cat": row.lane,
                "pid": 0,
                "tid": threads + track,
                "ts": (event.start - timeline.start) * MICROSECONDS,
                "dur": (event.end - event.start) * MICROSECONDS,
                "args": {"bytes": event.nbytes},
            }
            for event, track in zip(row.events, row.tracks, strict=True)
        ]
        threads += row.depth
    return found


def _thread_name(thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": {"name": name}}
