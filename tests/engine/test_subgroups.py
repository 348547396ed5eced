import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstep.engine.subgroups import ShardSpec, cut, state_bytes_per_element

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPECS = st.lists(st.tuples(st.integers(0, 50), st.sampled_from(DTYPES), st.integers(0, 2)), max_size=12).map(
    lambda rows: [ShardSpec(i, numel, dtype, group) for i, (numel, dtype, group) in enumerate(rows)]
)


@given(SPECS, st.integers(1, 400))
def test_every_element_lies_in_exactly_one_subgroup(specs, subgroup_bytes):
    covered = {spec.shard: [] for spec in specs}
    for subgroup in cut(specs, subgroup_bytes):
        for part in subgroup.slices:
            covered[part.shard] += range(part.start, part.stop)
    assert covered == {spec.shard: list(range(spec.numel)) for spec in specs}


@given(SPECS, st.integers(1, 400))
def test_slices_fill_a_record_without_gaps_and_within_its_size(specs, subgroup_bytes):
    by_shard = {spec.shard: spec for spec in specs}
    for subgroup in cut(specs, subgroup_bytes):
        filled = 0
        for part in subgroup.slices:
            assert part.offset == filled
            filled += part.length
        kinds = {(by_shard[p.shard].group, by_shard[p.shard].dtype) for p in subgroup.slices}
        assert filled == subgroup.numel
        assert len(kinds) == 1
        _, dtype = kinds.pop()
        assert subgroup.numel == 1 or subgroup.numel * state_bytes_per_element(dtype) <= subgroup_bytes


def test_a_bf16_parameter_costs_ten_bytes_an_fp32_one_eight():
    assert [state_bytes_per_element(d) for d in DTYPES] == [10, 12, 8]


@given(st.integers(640, 4000))
def test_full_subgroups_begin_where_a_cache_line_does(subgroup_bytes):
    parts = cut([ShardSpec(0, 1000, torch.bfloat16, 0)], subgroup_bytes)
    assert all(subgroup.slices[0].start * torch.bfloat16.itemsize % 64 == 0 for subgroup in parts)
