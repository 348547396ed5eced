"""A bar for work that is measured in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def transfer_bar(console: Console, words: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `on_progress(done, total)`, in bytes: it moves a bar on a terminal, and is silent elsewhere.

    The bar goes away at the end.
    """
    if not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (DownloadColumn(), BarColumn(bar_width=10), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn(words), *columns, console=console, transient=True) as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
