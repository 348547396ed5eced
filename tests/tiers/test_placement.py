import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstep.errors import BudgetError
from tierstep.tiers.placement import Budgets, place

PAGE = 4096


def padded(sizes):
    return [-(-size // PAGE) * PAGE for size in sizes]


def test_everything_fits_on_the_device_tier():
    placement = place([100, 100], [PAGE, PAGE], Budgets(device=200, host=0, nvme=0))
    assert placement.homes == ("device", "device")
    assert placement.slot_count == 0


def test_tiers_are_filled_from_hot_to_cold():
    placement = place([PAGE] * 5, [PAGE] * 5, Budgets(device=PAGE, host=PAGE * 3, nvme=PAGE * 9), slots=2)
    assert placement.homes == ("device", "host", "nvme", "nvme", "nvme")
    assert (placement.slot_count, placement.slot_nbytes) == (2, PAGE)


def test_no_slots_are_taken_when_nothing_is_cold():
    placement = place([PAGE] * 3, [PAGE] * 3, Budgets(device=0, host=3 * PAGE, nvme=99 * PAGE))
    assert placement.homes == ("host",) * 3
    assert placement.slots_nbytes == 0


def test_a_host_budget_below_one_slot_is_refused_with_numbers():
    with pytest.raises(BudgetError, match=f"{PAGE - 1} bytes cannot hold 1 staging slot.*raise ram"):
        place([PAGE] * 3, [PAGE] * 3, Budgets(device=0, host=PAGE - 1, nvme=99 * PAGE))


def test_state_larger_than_all_budgets_is_refused_with_numbers():
    with pytest.raises(BudgetError, match="state takes 300 bytes.*gpu 100.*ram 100"):
        place([100] * 3, [PAGE] * 3, Budgets(device=100, host=100, nvme=0))


@given(
    sizes=st.lists(st.integers(1, 50_000), min_size=1, max_size=30),
    device=st.integers(0, 300_000),
    host=st.integers(0, 600_000),
    nvme=st.integers(0, 2_000_000),
    slots=st.one_of(st.none(), st.integers(1, 5)),
)
def test_a_placement_never_exceeds_a_budget(sizes, device, host, nvme, slots):
    try:
        placement = place(sizes, padded(sizes), Budgets(device, host, nvme), slots)
    except BudgetError:
        return
    used = {tier: 0 for tier in ("device", "host", "nvme")}
    for size, page, home in zip(sizes, padded(sizes), placement.homes, strict=True):
        used[home] += page if home == "nvme" else size
    cold = [p for p, home in zip(padded(sizes), placement.homes, strict=True) if home == "nvme"]
    assert used["device"] <= device
    assert used["host"] + placement.slots_nbytes <= host
    assert used["nvme"] <= nvme
    assert not cold or placement.slot_nbytes == max(cold)
    assert placement.slot_count <= len(cold)
    assert bool(cold) == bool(placement.slot_count)
