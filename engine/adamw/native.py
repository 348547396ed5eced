"""The compiled kernel (kernel.cpp), called through ctypes, which releases the GIL."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from tierstep.engine.adamw.formula import Scalars
from tierstep.engine.adamw.piece import Piece
from tierstep.errors import ConfigError

DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as in kernel.cpp
BLOCK = 4096


class _Scalars(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in Scalars.__dataclass_fields__)


class _Segment(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("grad_dtype", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("scalars", ctypes.c_int64),
    )


class _Fields(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("low", "master", "exp_avg", "exp_avg_sq"))


@dataclass(frozen=True)
class KernelStatus:
    """Whether the compiled kernel can be used here, and the reason in words."""

    available: bool
    reason: str


class NativeKernel:
    """See `CpuKernel`. Picks AVX-512, AVX2 or baseline code at run time; immune to flush-to-zero settings.

    Each calling thread has OpenMP threads of its own, which live as long as it does. A forked child works on the
    calling thread alone, whatever `threads` says: it would wait for ever for the threads that its parent had.
    """

    name = "native"

    def __init__(self) -> None:
        library = _load()
        if isinstance(library, str):
            raise ConfigError(f"the native kernel is not available: {library}")
        self._library = library

    def update(self, pieces: Sequence[Piece], fields: Mapping[str, torch.Tensor], *, threads: int = 1) -> None:
        """See `CpuKernel.update`."""
        if not pieces:
            return
        numbers = list(dict.fromkeys(piece.scalars for piece in pieces))
        places = {scalars: place for place, scalars in enumerate(numbers)}
        segments = (_Segment * len(pieces))(*(_segment(piece, places[piece.scalars]) for piece in pieces))
        scalars = (_Scalars * len(numbers))(*(_Scalars(*each.values()) for each in numbers))
        addresses = _Fields(**{name: field.data_ptr() for name, field in fields.items()})
        weight_dtype = DTYPE_CODES[pieces[0].weight.dtype]
        self._library.tierstep_adamw_update(
            segments, len(pieces), weight_dtype, ctypes.byref(addresses), scalars, _usable(threads)
        )

    def all_finite(self, values: torch.Tensor, *, threads: int = 1) -> bool:
        """See `CpuKernel.all_finite`."""
        code = DTYPE_CODES[values.dtype]
        return bool(self._library.tierstep_all_finite(values.data_ptr(), values.numel(), code, _usable(threads)))

    def sum_squares(self, values: torch.Tensor, *, threads: int = 1) -> torch.Tensor:
        """See `CpuKernel.sum_squares`."""
        sums = torch.empty(-(-values.numel() // BLOCK), dtype=torch.float64)
        code = DTYPE_CODES[values.dtype]
        self._library.tierstep_sum_squares(values.data_ptr(), values.numel(), code, sums.data_ptr(), _usable(threads))
        return sums


_importing_process = os.getpid()


def _usable(threads: int) -> int:
    """Return `threads`, or 1 in a child forked since the import: GNU OpenMP's threads do not survive a fork."""
    return threads if os.getpid() == _importing_process else 1


def status() -> KernelStatus:
    """Say whether the compiled kernel can be used, without raising."""
    library = _load()
    if isinstance(library, str):
        return KernelStatus(available=False, reason=library)
    return KernelStatus(available=True, reason=f"loaded from {Path(library._name).name}")


def _segment(piece: Piece, scalars: int) -> _Segment:
    grad_dtype = DTYPE_CODES[piece.grad.dtype]
    length = piece.weight.numel()
    return _Segment(piece.weight.data_ptr(), piece.grad.data_ptr(), grad_dtype, piece.start, length, scalars)


@cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or why there is none."""
    folder = Path(__file__).parent
    built = [folder / f"_kernel{suffix}" for suffix in EXTENSION_SUFFIXES if (folder / f"_kernel{suffix}").exists()]
    if not built:
        return (
            f"it was not built when tierstep was installed (for {sysconfig.get_platform()}): "
            f"install a C++ compiler such as g++ and reinstall tierstep"
        )
    try:
        library = ctypes.CDLL(str(built[0]))
        _declare(library)
    except (OSError, AttributeError) as error:
        return f"{built[0].name} cannot be loaded ({error}): reinstall tierstep"
    return library


def _declare(library: ctypes.CDLL) -> None:
    pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.tierstep_adamw_update.argtypes = [pointer, int64, int64, pointer, pointer, int32]
    library.tierstep_adamw_update.restype = None
    library.tierstep_all_finite.argtypes = [pointer, int64, int64, int32]
    library.tierstep_all_finite.restype = int32
    library.tierstep_sum_squares.argtypes = [pointer, int64, int64, pointer, int32]
    library.tierstep_sum_squares.restype = None
