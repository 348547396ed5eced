"""The performance model: what a step takes at least, and which lane that comes from. Pure; `rates` measures.

With x the share of the bytes of records that the GPU updates, R bytes of records in host memory, W of their weights, G
of their gradients and K = 2 R + 2 W + G what a kernel reads and writes, a step is no faster than the slowest of

    h2d      (x R + (1 - x) W) / rate            records to the GPU, weights back from the CPU
    d2h      (x R + (1 - x) (W + G)) / rate      records back, weights and gradients to the CPU
    cpu      (1 - x) K / rate
    gpu      x K / rate                          and all of the device tier
    memory   (x 2 R + (1 - x) (K + 2 W + G)) / rate      host memory, which everything above shares
    files    (read + written) / rate

and x is chosen so that the slowest is as fast as can be. `simulation.simulate` adds what this leaves out: pieces of a
finite size, lanes that wait for each other, beginning and end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tierstep.engine.plan import Division

SHARES = 200  # steps in which x is tried
LARGEST_STRIDE = 32


@dataclass(frozen=True)
class GpuRates:
    """Measured speeds of a GPU and of its link, in bytes a second.

    update      its kernel: bytes of records, weights and gradients, read and written
    h2d, d2h    one way alone, pinned
    both        each way, while the other goes on too
    """

    update: float
    h2d: float
    d2h: float
    both: float


@dataclass(frozen=True)
class MachineRates:
    """Measured speeds, in bytes a second.

    update      the kernel on the CPU, all threads: bytes of records, weights and gradients, read and written
    memory      host memory, with everything that uses it at once
    check       the search for NaN and inf before a step: bytes of gradients, where the gradients are
    files       nvme directories, read and written at once; None without any
    gpu         None without one
    """

    update: float
    memory: float
    check: float
    files: float | None = None
    gpu: GpuRates | None = None


@dataclass(frozen=True)
class Load:
    """What a subgroup brings to a step, in bytes: its record in host memory or on the device, its weights and
    gradients."""

    home: str
    record: int
    weights: int
    gradients: int

    @property
    def kernel(self) -> int:
        """What an update reads and writes."""
        return 2 * self.record + 2 * self.weights + self.gradients


@dataclass(frozen=True)
class Limit:
    """The least time of a step, the lane that it comes from, and the GPU's share of the records in host memory."""

    seconds: float
    lane: str
    gpu_share: float


def least_seconds(
    loads: Sequence[Load], rates: MachineRates, division: Division | None = None, moved_file_bytes: int = 0
) -> Limit:
    """Return the least time of a step over `loads` (see above).

    `moved_file_bytes` are read, and as many written. `division` is None where there is no GPU.
    """
    files = 0.0 if not rates.files else 2 * moved_file_bytes / rates.files
    if rates.gpu is None or division is None:
        update = sum(load.kernel for load in loads) / rates.update
        return Limit(max(update, files), "cpu" if update >= files else "files", 0.0)
    shares = {"cpu": [0.0], "gpu": [1.0], "stride": [1 / division.stride]}.get(
        division.schedule, [step / SHARES for step in range(SHARES + 1)]
    )
    found = [_with_share(loads, rates, rates.gpu, share) | {"files": files} for share in shares]
    share, lanes = min(zip(shares, found, strict=True), key=lambda pair: max(pair[1].values()))
    lane = max(lanes, key=lambda name: lanes[name])
    return Limit(lanes[lane], lane, share)


def _with_share(loads: Sequence[Load], rates: MachineRates, gpu: GpuRates, share: float) -> dict[str, float]:
    """Return the seconds of every lane when the GPU updates a share of what lies in host memory."""
    host = [load for load in loads if load.home != "device"]
    records, weights = sum(load.record for load in host), sum(load.weights for load in host)
    gradients, kernel = sum(load.gradients for load in host), sum(load.kernel for load in host)
    resident = sum(load.kernel for load in loads if load.home == "device")
    rest = 1 - share
    return {
        "h2d": (share * records + rest * weights) / gpu.both,
        "d2h": (share * records + rest * (weights + gradients)) / gpu.both,
        "cpu": rest * kernel / rates.update,
        "gpu": (resident + share * kernel) / gpu.update,
        "memory": (share * 2 * records + rest * (kernel + 2 * weights + gradients)) / rates.memory,
    }


def best_stride(rates: MachineRates, load: Load) -> int:
    """Return Deep Optimizer States' update stride: the GPU updates every so many-th subgroup.

    The closed form of the paper (arXiv:2410.21316), as its code has it, is

        k = 1 + (3 / B + 1 / U_g) / (1 / U_c + 1 / D_c - 1 / (2 B))

    with B the link's parameters a second each way at 4 bytes a parameter, U_g and U_c the updates of GPU and CPU, and
    D_c the conversion of gradients on the CPU. It says: while the CPU updates k - 1 subgroups, one makes its way
    through the GPU, which costs three transfers of fp32 numbers each way and the update; each of the CPU's own costs
    the update and the conversion, less the transfer of half-precision weights that goes on beside it. Our CPU kernel
    converts while it updates, so 1 / D_c is 0. Rounded up to at least 2; the GPU's share is 1 / k.
    """
    if rates.gpu is None:
        raise ValueError("there is no GPU to have a stride for")
    parameters = load.weights / 2  # of the dtypes that a link is worth sharing for
    link = rates.gpu.both / 4
    on_gpu, on_cpu = (rate / (load.kernel / parameters) for rate in (rates.gpu.update, rates.update))
    most = 1 / on_cpu - 1 / (2 * link)
    if most <= 0:
        return 2
    return min(LARGEST_STRIDE, max(2, math.ceil(1 + (3 / link + 1 / on_gpu) / most)))
