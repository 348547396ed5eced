"""The AdamW update, in one formula and several bit-identical implementations."""

from tierstep.engine.adamw.kernels import CpuKernel, cpu_kernel

__all__ = ["CpuKernel", "cpu_kernel"]
