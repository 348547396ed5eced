"""Choosing what a training run's steps are computed with, by where its parameters are."""

from __future__ import annotations

import torch

from tierstep.configs.schema import Tiers
from tierstep.engine.accelerated import GpuCompute
from tierstep.engine.accelerator import Accelerator
from tierstep.engine.adamw.kernels import cpu_kernel, gpu_kernel
from tierstep.engine.compute import Compute, CpuCompute
from tierstep.engine.plan import Division
from tierstep.engine.planning import MemoryPlan


def open_compute(tiers: Tiers, accelerator: Accelerator | None) -> Compute:
    """Return what parameters on an accelerator, or on the CPU, are updated with. Raises `ConfigError`."""
    threads = tiers.threads or torch.get_num_threads()
    if accelerator is None:
        return CpuCompute(cpu_kernel(tiers.kernel), threads)
    return GpuCompute(accelerator, gpu_kernel(tiers.kernel), cpu_kernel(tiers.kernel), threads)


def division(plan: MemoryPlan, tiers: Tiers) -> Division | None:
    """Return who may update what under a plan; None where there is no GPU and all lanes are alike."""
    if not plan.on_gpu:
        return None
    return Division(tiers.schedule if plan.device_slot_count else "cpu", tiers.stride)
