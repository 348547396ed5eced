"""What every implementation of the update on the CPU offers, and choosing one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from tierstep.engine.adamw.piece import Piece
from tierstep.errors import ConfigError

KERNELS = ("auto", "native", "reference")
ENVIRONMENT = "TIERSTEP_KERNEL"


class UpdateKernel(Protocol):
    """Implementations agree in every bit, whatever the device and the number of threads. Any thread may call."""

    name: str

    def update(self, pieces: Sequence[Piece], fields: Mapping[str, torch.Tensor], *, threads: int) -> None:
        """Update pieces of one record in place: its fields (see `record_fields`) and the pieces' weights.

        The pieces' weights share a dtype, and the pieces do not overlap. Blocks for tensors on the CPU; those on a GPU
        (`threads` means nothing then) are updated on torch's current stream.
        """

    def sum_squares(self, values: torch.Tensor, *, threads: int) -> torch.Tensor:
        """Return the sum of squares of each 4096 elements of a 1-D contiguous tensor, as 1-D fp64 on its device."""


class CpuKernel(UpdateKernel, Protocol):
    """A kernel for tensors on the CPU. All methods block."""

    def all_finite(self, values: torch.Tensor, *, threads: int) -> bool:
        """Say whether a 1-D contiguous bf16, fp16 or fp32 tensor has neither inf nor nan."""


def cpu_kernel(name: str = "auto") -> CpuKernel:
    """Return the kernel called `name`; "auto" is the compiled one where it is there.

    The environment variable TIERSTEP_KERNEL decides for "auto". Raises `ConfigError` for an unknown name, and for
    "native" where it cannot be loaded.
    """
    from tierstep.engine.adamw.native import NativeKernel, status
    from tierstep.engine.adamw.reference import ReferenceKernel

    if name == "auto":
        name = os.environ.get(ENVIRONMENT) or "auto"
    if name not in KERNELS:
        raise ConfigError(f"kernel {name!r} is unknown: use one of {', '.join(KERNELS)}")
    if name == "reference":
        return ReferenceKernel()
    found = status()
    if found.available:
        return NativeKernel()
    if name == "native":
        raise ConfigError(f"the native kernel is not available: {found.reason}; or use kernel='reference'")
    return ReferenceKernel()


def gpu_kernel(name: str = "auto") -> UpdateKernel:
    """Return the kernel for tensors on a CUDA device: Triton's, or plain torch operations where there is no Triton.

    `name` and errors are those of `cpu_kernel`; "native" asks for Triton.
    """
    from tierstep.engine.adamw.reference import ReferenceKernel

    if name == "auto":
        name = os.environ.get(ENVIRONMENT) or "auto"
    if name == "reference":
        return ReferenceKernel()
    try:
        from tierstep.engine.adamw.triton_kernel import TritonKernel
    except ImportError as error:
        if name == "native":
            raise ConfigError(
                f"the GPU kernel needs Triton ({error}): install it, or use kernel='reference'"
            ) from error
        return ReferenceKernel()
    return TritonKernel()
