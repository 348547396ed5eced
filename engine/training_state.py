"""The whole state of one optimizer: its shards, how they are cut, where their records are, and their step counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.shards import Shard
from tierstep.engine.subgroups import Slice, Subgroup
from tierstep.tiers.slots import Arena, Slot
from tierstep.tiers.store import Store


@dataclass
class TrainingState:
    """Shards, subgroups and records belong together by position: subgroup i's record is record i of the store.

    `steps[shard]` is the number of updates that a parameter has seen, as torch's `state["step"]`.
    """

    store: Store
    shards: list[Shard] = field(default_factory=list)
    subgroups: list[Subgroup] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    _slices: dict[int, list[tuple[int, Slice]]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.store.describe = self.describe

    def describe(self, subgroup: int) -> str:
        """Return a subgroup as error messages name it: with the parameters that it holds elements of."""
        names = [self.shards[part.shard].name for part in self.subgroups[subgroup].slices]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"the state of {', '.join(names[:3])}{more} (record {subgroup})"

    def extend(self, shards: Sequence[Shard], subgroups: Sequence[Subgroup], homes: Sequence[str]) -> None:
        """Append parameters with their subgroups; their records start as zeros. Raises before anything is kept."""
        self.store.add([subgroup.layout for subgroup in subgroups], homes)
        for index, subgroup in enumerate(subgroups, start=len(self.subgroups)):
            for part in subgroup.slices:
                self._slices.setdefault(part.shard, []).append((index, part))
        self.shards += shards
        self.subgroups += subgroups
        self.steps += [0] * len(shards)

    def slices_of(self, shard: int) -> list[tuple[int, Slice]]:
        """Return where a parameter's elements lie: (subgroup, slice) in the parameter's order."""
        return self._slices.get(shard, [])

    def gather(self, shard: int) -> dict[str, torch.Tensor]:
        """Return copies of a parameter's fields in its shape, on the CPU. Blocks; reads records where they are."""
        parameter = self.shards[shard].parameter
        fields = {
            name: torch.empty(parameter.numel(), dtype=dtype, device="cpu")
            for name, dtype in record_fields(parameter.dtype)
        }
        buffer = self.record_buffer()
        for index, part in self.slices_of(shard):
            record = self.store.read(index, buffer)
            for name, values in fields.items():
                values[part.start : part.stop] = record[name][part.offset : part.offset + part.length]
        return {name: values.view(parameter.shape) for name, values in fields.items()}

    def rewrite(
        self, fill: Callable[[int, dict[str, torch.Tensor]], None], unless: Callable[[int], bool] = lambda index: False
    ) -> None:
        """Replace every record. Blocks.

        `fill(subgroup, fields)` sets every element of every field, except where `unless(subgroup)` has replaced the
        record itself and says so.
        """
        buffer = self.record_buffer()
        for index, subgroup in enumerate(self.subgroups):
            if unless(index):
                continue
            fill(index, subgroup.layout.views(buffer.tensor))
            self.store.write(index, buffer)

    def scatter(self, values: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Set fields of parameters, given as {shard: {field: values in its shape}}; the rest becomes zero. Blocks."""

        def fill(index: int, fields: dict[str, torch.Tensor]) -> None:
            for part in self.subgroups[index].slices:
                given = values.get(part.shard, {})
                for name, target in fields.items():
                    here = target[part.offset : part.offset + part.length]
                    if name in given:
                        here.copy_(given[name].reshape(-1)[part.start : part.stop])
                    else:
                        here.zero_()

        self.rewrite(fill)

    def record_buffer(self) -> Slot:
        """Return a buffer outside the slots that holds any one record; it is freed with its last reference."""
        nbytes = max((subgroup.layout.padded_nbytes for subgroup in self.subgroups), default=0)
        if not nbytes:
            return Slot(-1, torch.empty(0, dtype=torch.uint8), memoryview(b""))
        return Slot(-1, *Arena(nbytes).cut(nbytes))
