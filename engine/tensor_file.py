"""Tensors in a safetensors file, streamed out one by one and checked one by one.

The format is the public one (8 bytes of header length, a JSON header, the tensors' bytes), so that any tool can read
the weights of a checkpoint. Reading is left to the safetensors library; writing is done here because the library's
writer takes copies of all tensors at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from tierstep.errors import CheckpointCorrupt, ConfigError
from tierstep.io.failures import named_failures
from tierstep.tiers.record import bytes_of

HEADER_LIMIT_BYTES = 100 << 20  # that of the safetensors library
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write tensors to a new file and make it durable; return each one's checksum. Blocks.

    Takes memory for one tensor at a time, and only where it is not a contiguous tensor on the CPU.
    """
    checksums = {}
    with named_failures(f"writing {path}", path), path.open("xb") as file:
        file.write(_header(tensors))
        for name, tensor in tensors.items():
            payload = _payload(tensor)
            checksums[name] = xxhash.xxh3_128_hexdigest(payload)
            file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def file_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] = {}) -> bytes:
    """Return what a safetensors file of tensors of these dtypes and shapes, in this order, begins with."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the checksum of what says names, dtypes and shapes in the file of these tensors."""
    return xxhash.xxh3_128_hexdigest(_header(tensors))


def header_checksum_of(path: Path) -> str:
    """Return the checksum of the header of a file, as far as it is there. Raises `OSError` when it cannot be read."""
    with path.open("rb") as file:
        start = file.read(8)
        return xxhash.xxh3_128_hexdigest(start + file.read(min(int.from_bytes(start, "little"), HEADER_LIMIT_BYTES)))


def read_tensors(path: Path, checksums: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Read all tensors of a file and check them. Blocks. Raises `CheckpointCorrupt` naming file and tensor."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != set(checksums):
                raise CheckpointCorrupt(f"{path} holds other tensors than its manifest says: restore another one")
            for name in checksums:
                tensors[name] = file.get_tensor(name)
                if xxhash.xxh3_128_hexdigest(_payload(tensors[name])) != checksums[name]:
                    raise CheckpointCorrupt(f"tensor {name} in {path} is damaged: restore another checkpoint")
    except (SafetensorError, OSError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read ({error}): restore another checkpoint") from error
    return tensors


def require_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `ConfigError` naming a tensor that a safetensors file cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ConfigError(f"tensor {name} is {tensor.dtype}, which a safetensors file cannot hold")
        if name == "__metadata__" or not name.isprintable():
            raise ConfigError(f"a tensor is named {name!r}, which a safetensors file cannot hold: rename it")


def tensors_nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes that a file of these tensors takes, its header included."""
    return len(_header(tensors)) + sum(t.numel() * t.element_size() for t in tensors.values())


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    require_storable(tensors)
    return file_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})


def _payload(tensor: torch.Tensor) -> memoryview:
    return bytes_of(tensor.to("cpu").contiguous())
