from hypothesis import given
from hypothesis import strategies as st

from tierstep.engine.plan import plan_step

HOMES = ("device", "host", "nvme", "nvme", "nvme", "host")


def test_forwards_keeps_the_last_cold_records_in_slots():
    plan = plan_step(HOMES, range(6), (), 2, backwards=False)
    assert plan.cold == (2, 3, 4)
    assert plan.keep == {3, 4}
    assert plan.warm == (0, 1, 5)


def test_backwards_begins_with_what_the_last_step_left():
    plan = plan_step(HOMES, range(6), (3, 4), 2, backwards=True)
    assert plan.cold == (4, 3, 2)
    assert plan.keep == {3, 2}
    assert plan.write_back == ()


def test_a_resident_that_the_step_does_not_touch_is_written_back():
    plan = plan_step(HOMES, (0, 2), (4,), 2, backwards=False)
    assert plan.write_back == (4,)
    assert plan.cold == (2,)


@given(
    homes=st.lists(st.sampled_from(("device", "host", "nvme")), max_size=12),
    data=st.data(),
    slots=st.integers(1, 4),
    backwards=st.booleans(),
)
def test_every_touched_subgroup_is_planned_once_and_no_more_is_kept_than_slots(homes, data, slots, backwards):
    touched = data.draw(st.sets(st.sampled_from(range(len(homes))))) if homes else set()
    cold = [i for i, home in enumerate(homes) if home == "nvme"]
    resident = data.draw(st.sets(st.sampled_from(cold), max_size=slots)) if cold else set()
    plan = plan_step(homes, touched, resident, slots, backwards=backwards)
    assert sorted(plan.cold + plan.warm) == sorted(touched)
    assert len(plan.keep) <= slots
    assert plan.keep <= set(plan.cold)
    assert set(plan.write_back) == resident - touched
