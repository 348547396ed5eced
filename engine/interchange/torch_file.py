"""torch's own file format, written piece by piece: what `torch.save` writes, without the tensors ever being in memory.

The format is a zip archive without compression: `data.pkl` is the pickled object, in which a storage is a reference
(`persistent_id`) to an entry `data/<number>` with its bytes.
"""

from __future__ import annotations

import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from tierstep.engine.interchange.source import StreamedTensor
from tierstep.tiers.record import bytes_of

ROOT = "archive"
ALIGNMENT_BYTES = 64  # of storages in the file, as torch.save does, so that they can be used where they are mapped
PADDING_ID = b"FB"  # torch's mark of the extra field that does it
ZIP64_HEADER_BYTES = 20
ZIP64_FROM_BYTES = 1 << 30
STORAGES = {torch.float32: torch.FloatStorage}


def write_torch_file(file: BinaryIO, value: object, on_write: Callable[[int], None]) -> None:
    """Write nested dicts and lists of numbers, strings and `StreamedTensor` (fp32), which `torch.load` reads. Blocks.

    `file` is empty and seekable. Takes memory for one piece of one tensor. `on_write(nbytes)` is called after each.
    """
    pickler = _Pickler()
    pickled = pickler.pickled(value)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_entry("data.pkl", len(pickled), 0), pickled)
        archive.writestr(_entry("byteorder", 6, 0), b"little")
        for number, tensor in enumerate(pickler.tensors):
            entry = _entry(f"data/{number}", tensor.nbytes, file.tell())
            with archive.open(entry, "w", force_zip64=tensor.nbytes >= ZIP64_FROM_BYTES) as target:
                for piece in tensor.pieces():
                    target.write(bytes_of(piece))
                    on_write(piece.numel() * piece.element_size())
        archive.writestr(_entry("version", 2, 0), b"3\n")


@dataclass(frozen=True, eq=False)
class _Storage:
    number: int
    dtype: torch.dtype
    numel: int


class _Pickler(pickle.Pickler):
    """Writes each streamed tensor as torch pickles one, and notes them by the number of their storage."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        super().__init__(self, protocol=2)
        self.tensors: list[StreamedTensor] = []

    def write(self, part: bytes) -> None:
        """Take a part of the pickle (called by `dump`)."""
        self._parts.append(bytes(part))

    def pickled(self, value: object) -> bytes:
        """Return the pickle of `value`."""
        self.dump(value)
        return b"".join(self._parts)

    def reducer_override(self, obj: Any) -> Any:  # noqa: ANN401
        """See `pickle.Pickler`."""
        if not isinstance(obj, StreamedTensor):
            return NotImplemented
        storage = _Storage(len(self.tensors), obj.dtype, obj.numel)
        self.tensors.append(obj)
        arguments: tuple[Any, ...] = (storage, 0, obj.shape, _contiguous_strides(obj.shape), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments  # the name by which every torch file rebuilds its tensors

    def persistent_id(self, obj: Any) -> Any:  # noqa: ANN401
        """See `pickle.Pickler`."""
        if not isinstance(obj, _Storage):
            return None
        return "storage", STORAGES[obj.dtype], str(obj.number), "cpu", obj.numel


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def _entry(name: str, nbytes: int, offset: int) -> zipfile.ZipInfo:
    """Return an archive entry whose bytes begin at a multiple of 64 when its header is written at `offset`."""
    entry = zipfile.ZipInfo(f"{ROOT}/{name}")
    entry.compress_type = zipfile.ZIP_STORED
    entry.file_size = nbytes
    header = 30 + len(entry.filename) + 4 + (ZIP64_HEADER_BYTES if nbytes >= ZIP64_FROM_BYTES else 0)
    padding = -(offset + header) % ALIGNMENT_BYTES
    entry.extra = PADDING_ID + struct.pack("<H", padding) + bytes(padding)
    return entry
