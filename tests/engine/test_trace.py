import pytest

from tierstep.engine.trace import Event, Trace, busy_seconds


def test_overlapping_events_count_once():
    events = [Event("read", 0, 0.0, 2.0, 1), Event("read", 1, 1.0, 3.0, 1), Event("read", 2, 5.0, 6.0, 1)]
    assert busy_seconds(events) == pytest.approx(4.0)


def test_the_report_sums_up_per_lane():
    trace = Trace()
    trace.add("cpu", 3, 0.0, 1.0, 10)
    trace.add("write", 3, 1.0, 1.5, 4096)
    trace.add_stall("cpu", 0.25)
    report = trace.report(seconds=2.0, check_seconds=0.1, interval_seconds=4.0)
    assert report.updated == {"gpu": (), "cpu": (3,)}
    assert report.bytes_written == 4096
    assert report.stall_seconds == {"gpu": 0.0, "cpu": 0.25}
    assert report.terabytes_written_per_day == pytest.approx(4096 / 4.0 * 86400 / 1e12)
