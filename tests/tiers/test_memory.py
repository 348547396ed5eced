import re

import pytest
import torch

from tierstep.tiers.memory import available_bytes, total_bytes
from tierstep.tiers.slots import Arena, SlotPool


def test_a_control_group_limit_is_respected(tmp_path):
    for name, text in {"memory.max": "1000000", "memory.current": "400000"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert available_bytes(tmp_path) == 700_000
    assert total_bytes(tmp_path) == 1_000_000


def test_a_control_group_without_limit_leaves_the_machines_own(tmp_path):
    (tmp_path / "memory.max").write_text("max")
    (tmp_path / "memory.current").write_text("400000")
    assert available_bytes(tmp_path) > 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * int(re.search(r"Rss:\s+(\d+) kB", file.read()).group(1))


@pytest.mark.parametrize("nbytes", [9 << 20, int(1.125 * (1 << 26)), 100 * 4096 + 64])
def test_an_arena_takes_what_was_asked_and_at_most_two_percent_more(nbytes):
    """pytorch#150517: the caching host allocator takes the next power of two."""
    arena = Arena(nbytes)
    before = resident_bytes()
    arena.cut(nbytes)[0].fill_(1)
    grown = resident_bytes() - before
    assert grown <= 1.02 * nbytes + (1 << 20)


def test_an_arena_is_zero_and_refuses_more_than_it_has():
    arena = Arena(8192)
    assert not arena.cut(8000)[0].any()
    with pytest.raises(ValueError, match="no 400 bytes left"):
        arena.cut(400)


def test_slots_are_of_equal_size_and_do_not_overlap():
    pool = SlotPool(3, 4096)
    slots = [pool.acquire() for _ in range(3)]
    for slot in slots:
        slot.tensor.fill_(slot.index)
    assert all(slot.tensor.eq(slot.index).all() for slot in slots)
    assert [len(slot.memory) for slot in slots] == [4096] * 3
    assert torch.equal(slots[0].tensor, torch.frombuffer(slots[0].memory, dtype=torch.uint8))
