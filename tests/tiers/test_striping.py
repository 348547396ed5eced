"""Several directories: each gets what it can take, and a full one does not stop the others."""

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstep.errors import DiskFull
from tierstep.io.faults import Fail
from tierstep.io.memory import MemoryBackend
from tierstep.io.threads import ThreadBackend
from tierstep.tiers.nvme import NvmeTier
from tierstep.tiers.striping import Striping, measure_rates

A, B = Path("/a"), Path("/b")


def deal(rates, count):
    striping, places = Striping(rates), []
    for _ in range(count):
        places.append(striping.order()[0])
        striping.took(places[-1])
    return places


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=5), st.integers(1, 300))
def test_every_directory_has_its_share_after_any_number_of_records(rates, count):
    places = deal(rates, count)
    for place, rate in enumerate(rates):
        assert abs(places.count(place) - count * rate / sum(rates)) <= len(rates)


def test_directories_of_three_to_one_are_busy_for_the_same_time():
    places = deal([3e9, 1e9], 100)
    seconds = max(places.count(0) / 3e9, places.count(1) / 1e9)
    assert 100 / 4e9 / seconds >= 0.9
    assert {tuple(places[i : i + 4]).count(1) for i in range(0, 100, 4)} == {1}


def test_records_follow_the_rates():
    tier = NvmeTier([A, B], MemoryBackend(), [3.0, 1.0])
    tier.reserve(dict.fromkeys(range(8), 4096))
    assert [tier.path(index).parent for index in range(8)].count(B) == 2


def test_a_full_directory_is_passed_over():
    backend = MemoryBackend()
    backend.inject(Fail(errno.ENOSPC), when=lambda o: o.kind == "allocate" and o.path.parent == A and o.index > 1)
    tier = NvmeTier([A, B], backend)
    tier.reserve(dict.fromkeys(range(6), 4096))
    assert [tier.path(index).parent for index in range(6)].count(A) == 1


def test_when_all_are_full_nothing_is_left_behind():
    backend = MemoryBackend(capacity_bytes=3 * 4096)
    tier = NvmeTier([A, B], backend)
    with pytest.raises(DiskFull, match="/a|/b"):
        tier.reserve(dict.fromkeys(range(6), 4096))
    assert not backend.files


def test_directories_are_measured_and_left_clean(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with ThreadBackend() as backend:
        rates = measure_rates(backend, folders)
    assert min(rates) > 0
    assert not [*folders[0].iterdir(), *folders[1].iterdir()]


def test_a_directory_without_room_for_the_measurement_is_used_all_the_same():
    backend = MemoryBackend(capacity_bytes=40 << 20)
    assert measure_rates(backend, [A, B]) == [1.0, 1.0]
    assert not backend.files


def test_a_single_directory_is_not_measured():
    backend = MemoryBackend()
    assert measure_rates(backend, [A]) == [1.0]
    assert not backend.log
