"""Cutting parameters into subgroups: the units of placement, transfer, update and checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from tierstep.engine.adamw.fields import record_fields
from tierstep.tiers.record import RecordLayout

ALIGNMENT_ELEMENTS = 64  # of full subgroups: whole cache lines, whatever the dtype


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop` of a parameter's flat order, at element `offset` of the subgroup's fields."""

    shard: int
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Subgroup:
    """Consecutive elements of parameters that share a param group and a dtype, and the layout of their record."""

    slices: tuple[Slice, ...]
    layout: RecordLayout

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.layout.numel


@dataclass(frozen=True)
class ShardSpec:
    """What cutting needs to know of a parameter: its number, elements, dtype and param group."""

    shard: int
    numel: int
    dtype: torch.dtype
    group: int


def state_bytes_per_element(dtype: torch.dtype) -> int:
    """Bytes of state that AdamW keeps for one element of a parameter: 10 for bf16, 8 for fp32, 12 for fp16."""
    return sum(field_dtype.itemsize for _, field_dtype in record_fields(dtype))


def cut(specs: Iterable[ShardSpec], subgroup_bytes: int) -> list[Subgroup]:
    """Cut parameters, in their order, into subgroups of at most `subgroup_bytes` of state (at least one element).

    A full subgroup has a multiple of 64 elements where it has 64, so that the next one begins on a cache line: weights
    and gradients that straddle lines cost the kernels a tenth of their speed.

    Parameters of different groups or dtypes never share a subgroup. Parameters without elements get none.
    """
    ordered = sorted(specs, key=_bucket)
    buckets = (list(bucket) for _, bucket in groupby(ordered, key=_bucket))
    return [subgroup for bucket in buckets for subgroup in _cut_bucket(bucket, subgroup_bytes)]


def _bucket(spec: ShardSpec) -> tuple[int, str]:
    return spec.group, str(spec.dtype)


def _cut_bucket(specs: Sequence[ShardSpec], subgroup_bytes: int) -> Iterable[Subgroup]:
    dtype = specs[0].dtype
    capacity = max(1, subgroup_bytes // state_bytes_per_element(dtype))
    if capacity > ALIGNMENT_ELEMENTS:
        capacity -= capacity % ALIGNMENT_ELEMENTS
    slices: list[Slice] = []
    filled = 0
    for spec in specs:
        start = 0
        while start < spec.numel:
            stop = min(spec.numel, start + capacity - filled)
            slices.append(Slice(spec.shard, start, stop, filled))
            filled += stop - start
            start = stop
            if filled == capacity:
                yield Subgroup(tuple(slices), RecordLayout(filled, record_fields(dtype)))
                slices, filled = [], 0
    if filled:
        yield Subgroup(tuple(slices), RecordLayout(filled, record_fields(dtype)))
