import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor

import tierstep
from tierstep.engine.picture import COLOURS, LEFT, RIGHT, SCALE, WIDTH, draw_timeline, round_step
from tierstep.engine.timeline import Event, Timeline
from tierstep.errors import ConfigError

STEP = Timeline(
    (
        Event("write", 1, 12.0, 14.0, 4096),
        Event("cpu", 1, 10.0, 12.0, 4000),
        Event("gpu", 0, 10.0, 11.0, 4000),
        Event("write", 0, 11.0, 13.0, 4096),
    )
).joined_by([Event("forward", 0, 6.0, 10.0, 0)])


def colours_at(image: Image.Image, seconds: float) -> list[tuple[int, int, int]]:
    """Return the colours from top to bottom at a moment of a timeline that lasts eight seconds."""
    x = round((LEFT + seconds / 8 * (WIDTH - LEFT - RIGHT)) * SCALE)
    column = [image.getpixel((x, y)) for y in range(image.height)]
    return [a for a, b in zip(column, [None, *column], strict=False) if a != b]


def test_rows_come_in_the_order_of_a_step_and_add_up():
    rows = STEP.rows()
    assert [row.lane for row in rows] == ["forward", "gpu", "cpu", "write"]
    assert (rows[3].depth, rows[3].busy_seconds, rows[3].nbytes) == (2, 3.0, 8192)
    assert (STEP.start, STEP.seconds) == (6.0, 8.0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1))
def test_events_of_one_track_never_overlap_and_no_track_is_superfluous(spans):
    (row,) = Timeline(tuple(Event("read", i, s, s + d, 0) for i, (s, d) in enumerate(spans))).rows()
    for track in range(row.depth):
        events = [event for event, at in zip(row.events, row.tracks, strict=True) if at == track]
        assert all(a.end <= b.start for a, b in zip(events, events[1:], strict=False))
    assert row.depth == max(sum(s <= t < s + d for s, d in spans) for t, _ in spans)


def test_the_json_is_a_chrome_trace_with_a_named_thread_for_each_track(tmp_path):
    STEP.save_json(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert list(names.values()) == ["forward", "gpu", "cpu", "write", "write"]
    shown = {(names[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["bytes"]) for e in events if e["ph"] == "X"}
    assert ("forward", "micro-batch 0", 0.0, 4e6, 0) in shown
    assert ("write", "subgroup 1", 6e6, 2e6, 4096) in shown
    assert len({e["tid"] for e in events if e["name"].startswith("subgroup") and e["cat"] == "write"}) == 2


def test_the_picture_has_each_lane_where_it_worked():
    image = draw_timeline(STEP, "a step")
    present = {lane: ImageColor.getrgb(colour) for lane, colour in COLOURS.items()}
    for seconds, lanes in [(2.05, ["forward"]), (4.2, ["gpu", "cpu"]), (5.3, ["cpu", "write"]), (7.7, ["write"])]:
        shown = colours_at(image, seconds)
        assert [lane for lane, colour in present.items() if colour in shown] == lanes


def test_an_empty_step_can_be_drawn(tmp_path):
    Timeline(()).save_png(tmp_path / "empty.png")
    with Image.open(tmp_path / "empty.png") as image:
        assert image.width == WIDTH * SCALE


@pytest.mark.parametrize(("least", "step"), [(0.9, 1), (1.0, 1), (1.1, 2), (2.1, 5), (5.1, 10), (0.03, 0.05)])
def test_ticks_are_round(least, step):
    assert round_step(least) == pytest.approx(step)


def test_without_pillow_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"needs Pillow.*tierstep\[timeline\]"):
        STEP.save_png(tmp_path / "step.png")


def test_an_optimizer_traces_its_last_step(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(2000))
    tiers = tierstep.Tiers(gpu=0, ram="8KiB", nvme=[tmp_path], subgroup=2048)
    with tierstep.AdamW([parameter], tiers=tiers) as optimizer:
        assert optimizer.trace() is None
        for _ in range(3):
            parameter.grad = torch.ones(2000)
            optimizer.step()
        lanes = {row.lane: [event.item for event in row.events] for row in optimizer.trace().rows()}
    assert sorted(lanes.get("gpu", []) + lanes.get("cpu", [])) == list(range(8))
    assert len(lanes["read"]) == len(lanes["write"]) == 6
