"""Where each tensor lies in a safetensors file, so that it can be read and checked piece by piece."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from tierstep.engine.saved_state import read_into
from tierstep.engine.tensor_file import DTYPE_NAMES, HEADER_LIMIT_BYTES
from tierstep.errors import CheckpointCorrupt

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class TensorPlace:
    """Bytes `start` to `stop` of a file are a tensor's elements in row-major order."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return elements `first` to `last` of the flat order, 1-D, on the CPU. Blocks."""
        values = torch.empty(last - first, dtype=self.dtype)
        read_into(self.path, self.start + first * self.dtype.itemsize, values)
        return values


def index_tensors(path: Path) -> dict[str, TensorPlace]:
    """Return the places of all tensors of a safetensors file, in the order of their bytes. Blocks.

    Raises `CheckpointCorrupt` when the file is missing or not exactly what its header says. Reads the header only.
    """
    try:
        header, begin, size = _read_header(path)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        places = {name: _place(path, entry, begin) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"{path} cannot be read as a safetensors file ({_words(error)}): use another one"
        ) from error
    ordered = dict(sorted(places.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = begin
    for name, place in ordered.items():
        if place.start != end:
            raise CheckpointCorrupt(f"{path} is damaged: the bytes of {name} do not begin where the others end")
        end = place.stop
    if end != size:
        raise CheckpointCorrupt(f"{path} is damaged: it has {size} bytes instead of the {end} of its header")
    return ordered


def verify_tensors(
    path: Path, checksums: Mapping[str, str], on_read: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Read every byte of a safetensors file and compare each tensor with its checksum, a few MiB at a time. Blocks.

    `on_read(nbytes)` is called after every piece. Raises `CheckpointCorrupt` naming file and tensor.
    """
    places = index_tensors(path)
    if set(places) != set(checksums):
        raise CheckpointCorrupt(f"{path} holds other tensors than its manifest says: restore another one")
    buffer = torch.empty(READ_BYTES, dtype=torch.uint8)
    for name, place in places.items():
        digest = xxhash.xxh3_128()
        for start in range(place.start, place.stop, READ_BYTES):
            piece = buffer[: min(READ_BYTES, place.stop - start)]
            read_into(path, start, piece)
            digest.update(piece.numpy().data)
            on_read(piece.numel())
        if digest.hexdigest() != checksums[name]:
            raise CheckpointCorrupt(f"tensor {name} in {path} is damaged: restore another checkpoint")


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header, where the tensors begin, and the length of the file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    return header, 8 + length, size


def _place(path: Path, entry: Mapping[str, Any], begin: int) -> TensorPlace:
    dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"a tensor is of dtype {dtype!r}, which this version cannot read")
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError("a shape or an offset is no whole number")
    place = TensorPlace(path, DTYPES[dtype], tuple(shape), begin + start, begin + stop)
    if stop - start != place.numel * place.dtype.itemsize:
        raise ValueError(f"a tensor of {place.numel} elements of {dtype} has {stop - start} bytes")
    return place


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
