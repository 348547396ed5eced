"""The layout of one state record: its fields one after the other in one contiguous run of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import xxhash

from tierstep.io.alignment import ALIGNMENT_BYTES, align_up

FIELD_ALIGNMENT_BYTES = 64  # one cache line, and enough for every vector width


@dataclass(frozen=True)
class RecordLayout:
    """Where each field of a record of `numel` elements lies. Equal layouts mean equal bytes."""

    numel: int
    fields: tuple[tuple[str, torch.dtype], ...]

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """First byte of each field; fields start at multiples of 64 bytes."""
        offsets, end = {}, 0
        for name, dtype in self.fields:
            offsets[name] = align_up(end, FIELD_ALIGNMENT_BYTES)
            end = offsets[name] + self.numel * dtype.itemsize
        return offsets

    @cached_property
    def nbytes(self) -> int:
        """Bytes from the first field's start to the last field's end, rounded up to a cache line."""
        name, dtype = self.fields[-1]
        return align_up(self.offsets[name] + self.numel * dtype.itemsize, FIELD_ALIGNMENT_BYTES)

    @property
    def padded_nbytes(self) -> int:
        """Bytes of the record in a file: whole pages, as O_DIRECT asks."""
        return align_up(self.nbytes, ALIGNMENT_BYTES)

    def views(self, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each field of `record` (uint8, at least `nbytes` long) as a 1-D tensor that shares its memory."""
        return {
            name: record[start : start + self.numel * dtype.itemsize].view(dtype)
            for (name, dtype), start in zip(self.fields, self.offsets.values(), strict=True)
        }


def bytes_of(values: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy."""
    if not values.numel():
        return memoryview(bytearray())
    return values.detach().reshape(-1).view(torch.uint8).numpy().data


def checksum_of(record: memoryview) -> str:
    """Return the checksum of a record's bytes in a file: xxh3-128, as hexadecimal digits.

    The GIL is free meanwhile, which xxhash's one-call functions do not see to.
    """
    checksum = xxhash.xxh3_128()
    checksum.update(record)
    return checksum.hexdigest()
