"""Draws timelines. Pillow, which brings its own font, is the only thing here that is not always installed."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from tierstep.configs.sizes import format_bytes
from tierstep.engine.timeline import PASSES, Event, Row, Timeline
from tierstep.errors import ConfigError

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

# Lengths are in points; SCALE pixels each, so that the picture is sharp on dense screens.
SCALE = 2
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000, 150, 20, 44, 34
ROW_HEIGHT, TRACK_HEIGHT, ROW_GAP = 30, 10, 10
MOST_TICKS = 10
TEXT, FAINT, GRID, PAPER = "#24292f", "#6e7781", "#e3e6ea", "#ffffff"
COLOURS = {
    "forward": "#8c959f",
    "backward": "#57606a",
    "gpu": "#2da44e",
    "cpu": "#0969da",
    "h2d": "#bf8700",
    "d2h": "#bc4c00",
    "read": "#8250df",
    "write": "#cf222e",
}


def draw_timeline(timeline: Timeline, title: str) -> Image.Image:
    """Return a picture with a row for each lane that did anything: its name, how busy it was, and its events.

    Raises `ConfigError` where Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise ConfigError(
            "drawing a timeline needs Pillow, which is not installed: pip install 'tierstep[timeline]' "
            "(save_json needs nothing)"
        ) from error
    rows = timeline.rows()
    height = TOP + sum(_height(row) + ROW_GAP for row in rows) + BOTTOM
    image = Image.new("RGB", (WIDTH * SCALE, round(height * SCALE)), PAPER)
    _Drawing(ImageDraw.Draw(image), timeline.start, timeline.seconds or 1.0).draw(rows, title, height)
    return image


class _Drawing:
    """One picture under way. Takes points; `seconds` fill the width between the margins."""

    def __init__(self, canvas: ImageDraw.ImageDraw, start: float, seconds: float) -> None:
        self._canvas = canvas
        self._start = start
        self._seconds = seconds

    def draw(self, rows: list[Row], title: str, height: float) -> None:
        self._text(12, 12, title, 15, TEXT)
        self._axis(height - BOTTOM)
        top = float(TOP)
        for row in rows:
            self._row(row, top)
            top += _height(row) + ROW_GAP

    def _axis(self, bottom: float) -> None:
        """Draw a line from top to bottom at every round time, and write the time below it."""
        step = round_step(self._seconds / MOST_TICKS)
        unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if self._seconds >= u), (1e-6, "µs"))
        for tick in range(int(self._seconds / step) + 1):
            x = self._x(self._start + tick * step)
            self._box(x, TOP - 6, x + 1 / SCALE, bottom, GRID)
            self._text(x, bottom + 6, f"{tick * step / unit:.10g} {name}", 11, FAINT, centred=True)

    def _row(self, row: Row, top: float) -> None:
        height = _height(row)
        share = row.busy_seconds / self._seconds
        moved = f", {format_bytes(row.nbytes)}" if row.nbytes else ""
        self._text(12, top + height / 2 - 15, row.lane, 14, COLOURS.get(row.lane, TEXT))
        self._text(12, top + height / 2 + 2, f"{share:.0%} busy{moved}", 10, FAINT)
        track_height = height / row.depth
        for event, track in zip(row.events, row.tracks, strict=True):
            self._event(event, top + track * track_height, track_height)

    def _event(self, event: Event, top: float, height: float) -> None:
        """Draw a bar, with a gap after it where it is wide enough, and the subgroup's number where that fits."""
        left, right = self._x(event.start), self._x(event.end)
        gap = 1 / SCALE if right - left > 2 else 0.0
        self._box(left, top, max(right - gap, left + 1 / SCALE), top + height - gap, COLOURS.get(event.lane, TEXT))
        label, size = str(event.item), min(11.0, height - 1)
        if event.lane not in PASSES and _font(size).getlength(label) / SCALE < right - left - 3:
            self._text((left + right) / 2, top + (height - 1.2 * size) / 2, label, size, PAPER, centred=True)

    def _x(self, time: float) -> float:
        return LEFT + (time - self._start) / self._seconds * (WIDTH - LEFT - RIGHT)

    def _box(self, left: float, top: float, right: float, bottom: float, colour: str) -> None:
        pixels = [round(edge * SCALE) for edge in (left, top, right, bottom)]
        self._canvas.rectangle((pixels[0], pixels[1], max(pixels[0], pixels[2] - 1), pixels[3] - 1), fill=colour)

    def _text(self, x: float, y: float, text: str, size: float, colour: str, *, centred: bool = False) -> None:
        font = _font(size)
        if centred:
            x -= font.getlength(text) / SCALE / 2
        self._canvas.text((x * SCALE, y * SCALE), text, fill=colour, font=font)


@cache
def _font(size: float) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.load_default(size * SCALE)  # type: ignore[return-value]


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _height(row: Row) -> float:
    return max(ROW_HEIGHT, row.depth * TRACK_HEIGHT)
