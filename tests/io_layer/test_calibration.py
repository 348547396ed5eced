"""What was measured best for a drive is what "auto" takes there, and nowhere else."""

import dataclasses

import pytest

from tierstep.errors import ConfigError
from tierstep.io import calibration, engines
from tierstep.io.calibration import decide, sweep
from tierstep.io.calibration_cache import read_section, write_entry
from tierstep.io.drives import drives_of, find_mount
from tierstep.io.engines import Calibration, Engine, candidates, choose_engine, keep_calibration
from tierstep.io.selection import describe_backends, open_backend

MIB = 1 << 20
OTHER = Engine("threads", 3, 1, 2 * MIB)
RING = Engine("uring", 2, 4, MIB)


def measured(engine):
    return Calibration(engine, 4.5e9, 3e9, 6e9, 4e9, "2026-12-07")


def test_without_a_measurement_auto_is_the_default_and_says_how_to_measure(tmp_path):
    choice = choose_engine([tmp_path])
    assert choice.engine == Engine()
    assert "tierstep calibrate" in choice.reason
    assert choose_engine([]).engine == Engine()


def test_auto_takes_what_was_measured_best(tmp_path):
    keep_calibration([tmp_path], measured(OTHER))
    choice = choose_engine([tmp_path])
    assert choice.engine == OTHER
    for words in ("2026-12-07", "4.50 GB/s, against 4.00", "threads, 8 x 4 MiB"):
        assert words in choice.reason
    with open_backend("auto", directories=[tmp_path]) as backend:
        assert (backend.name, backend.block_bytes, len(backend._pool._threads)) == ("threads", 2 * MIB, 3)
    with open_backend("auto") as backend:
        assert backend.block_bytes == Engine().block_bytes


def test_a_backend_that_this_machine_lost_gives_way_with_the_reason(tmp_path, monkeypatch):
    keep_calibration([tmp_path], measured(RING))
    monkeypatch.setattr(engines.ring, "why_unavailable", lambda: "the kernel forbids io_uring")
    choice = choose_engine([tmp_path])
    assert choice.engine == Engine()
    assert "measured best, but the kernel forbids io_uring" in choice.reason
    assert "uring" not in {engine.backend for engine in candidates()}


@pytest.mark.parametrize(
    "change",
    [
        {"engine": None},
        {"engine": {"backend": "threads"}},
        {"engine": dataclasses.asdict(OTHER) | {"threads": 0}},
        {"engine": dataclasses.asdict(OTHER) | {"threads": "8"}},
        {"engine": dataclasses.asdict(OTHER) | {"threads": True}},
        {"engine": dataclasses.asdict(OTHER) | {"block_bytes": 1000}},
        {"engine": dataclasses.asdict(OTHER) | {"backend": "memory"}},
        {"mixed_rate": "fast"},
    ],
)
def test_an_entry_that_makes_no_sense_counts_as_none(tmp_path, change):
    write_entry("io-engines", drives_of([tmp_path]), dataclasses.asdict(measured(OTHER)) | change)
    assert choose_engine([tmp_path]).engine == Engine()


def test_the_key_names_the_drive_and_not_the_directory(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert drives_of([tmp_path / "a"]) == drives_of([tmp_path / "b", tmp_path / "a"])
    mounts = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:2 / /mnt/my\\040disk rw - xfs /dev/nvme0n1 rw\n"
    mount = find_mount(tmp_path.__class__("/mnt/my disk/x"), mounts)
    assert (mount.filesystem, mount.source, mount.point) == ("xfs", "/dev/nvme0n1", "/mnt/my disk")


def test_a_sweep_measures_every_engine_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "candidates", lambda: [Engine(), OTHER])
    steps = []
    found = sweep([tmp_path], seconds=0.01, file_bytes=MIB, on_progress=lambda *step: steps.append(step))
    assert set(found.samples) == {Engine(), OTHER}
    assert all(len(rates) == 4 for rates in found.samples.values())
    assert min(found.best.read_rate, found.best.write_rate, found.best.mixed_rate) > 0
    assert found.moved_bytes >= (8 + 8 * 8 + 2 * 4) * MIB
    assert list(tmp_path.iterdir()) == []
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert steps[-1][0] == steps[-1][1]


def test_a_sweep_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="--nvme DIR"):
        sweep([])


def test_a_difference_within_the_noise_changes_nothing():
    assert decide({Engine(): [100, 101, 99], OTHER: [102, 102, 300]}) == Engine()
    assert decide({Engine(): [100, 101, 99], OTHER: [104, 104, 1]}) == OTHER


def test_the_candidates_are_distinct_begin_with_the_default_and_can_be_opened():
    found = candidates()
    assert found[0] == Engine()
    assert len(set(found)) == len(found) > 5


def test_backends_are_described_with_what_auto_takes(tmp_path):
    keep_calibration([tmp_path], measured(OTHER))
    status = {s.name: s.reason for s in describe_backends([tmp_path])}
    assert status[f"auto in {tmp_path}"].startswith("takes threads, 3 x 2 MiB; measured best on 2026-12-07")
    assert read_section("io-engines")
