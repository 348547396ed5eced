"""Showing a run while it goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tierstep.configs.sizes import format_bytes
from tierstep.observer import RunStart, StepEvent, StepTimes
from tierstep.results import TrainResult

SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """An observer that keeps one line of a terminal up to date, in a `with` block, which gives the cursor back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._pace = _Pace()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def on_start(self, start: RunStart) -> None:
        """See `Observer`."""
        _say_start(self._console, start)
        self._bar.add_task("", total=start.last_step, completed=start.first_step - 1)
        self._bar.start()

    def on_step(self, event: StepEvent) -> None:
        """See `Observer`."""
        self._pace.add(event)
        self._bar.update(self._bar.task_ids[0], completed=event.step, description=self._pace.short_words(event))

    def on_end(self, result: TrainResult) -> None:
        """See `Observer`."""
        self._bar.stop()


class ProgressLines:
    """An observer that writes a plain line every ten seconds, at saves, and for the first and the last step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = _Pace()
        self._last_step = 0
        self._written = float("-inf")

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def on_start(self, start: RunStart) -> None:
        """See `Observer`."""
        self._last_step = start.last_step
        _say_start(self._console, start)

    def on_step(self, event: StepEvent) -> None:
        """See `Observer`."""
        self._pace.add(event)
        due = time.monotonic() - self._written >= SECONDS_BETWEEN_LINES
        if due or event.checkpoint or event.step == self._last_step:
            saved = f", saved {event.checkpoint.name}" if event.checkpoint else ""
            self._console.out(f"step {event.step}/{self._last_step}: {self._pace.words(event)}{saved}", highlight=False)
            self._written, self._pace = time.monotonic(), _Pace()

    def on_end(self, result: TrainResult) -> None:
        """See `Observer`."""


class _Pace:
    """Tokens a second and where the time goes, over the latest steps."""

    def __init__(self) -> None:
        self._latest: list[StepEvent] = []

    def add(self, event: StepEvent) -> None:
        self._latest = [*self._latest[-49:], event]

    def words(self, event: StepEvent) -> str:
        return f"loss {event.loss:.4f}, {self._tokens_per_second():,.0f} tokens/s, {time_shares(self._times())}"

    def short_words(self, event: StepEvent) -> str:
        """Return what fits beside a bar into 80 columns."""
        times = self._times()
        parts = {"fwd+bwd": times.forward_backward, "update": times.update, "files": times.stall}
        shares = " ".join(f"{name} {seconds / times.total:.0%}" for name, seconds in parts.items())
        return f"loss {event.loss:.3f} {self._tokens_per_second():,.0f} tok/s {shares}"

    def _times(self) -> StepTimes:
        return sum((event.times for event in self._latest), StepTimes())

    def _tokens_per_second(self) -> float:
        return sum(event.tokens for event in self._latest) / self._times().total


def time_shares(times: StepTimes) -> str:
    """Return where the time went, in percent."""
    shares = {
        "forward+backward": times.forward_backward,
        "update": times.update,
        "waiting for files": times.stall,
        "saving": times.save,
    }
    total = times.total or 1.0
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares.items())


def _say_start(console: Console, start: RunStart) -> None:
    for notice in start.notices:
        console.out(f"note: {notice}", highlight=False)
    if start.resumed_from is not None:
        console.out(f"resuming after step {start.first_step - 1} from {start.resumed_from}", highlight=False)
    tiers = ", ".join(f"{format_bytes(nbytes)} in {tier}" for tier, nbytes in start.plan.state_bytes.items())
    console.out(f"{start.parameters:,} parameters; their state: {tiers}", highlight=False)
