"""The CPU update kernel against torch's fused AdamW and DeepSpeed's, with the memory's limit beside it.

    python -m tierstep.bench.kernel [--params 50e6] [--threads N] [--repeats 15] [--deepspeed]

All run in this process, in turns, on the same threads, and on huge pages. A bf16 update moves 26 bytes a parameter:
gradient (2) and weight (2) are read, the weight is written (2), and the record (10) is read and written. The limit is
what memory gives to a loop with just that traffic (traffic.cpp, needs a compiler), or to a copy if that is faster.
DeepSpeedCPUAdam takes part with --deepspeed.
The last line is one JSON object with all raw samples; bench/results/ keeps it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from tierstep.bench.contestants import (
    Work,
    deepspeed_cpu_adam,
    median,
    memory_copy,
    own_kernel,
    same_traffic,
    take_turns,
    torch_fused,
    torch_fused_with_casts,
)
from tierstep.bench.provenance import publish
from tierstep.engine.adamw import cpu_kernel

BYTES_PER_PARAMETER = {
    "tierstep bf16": 26,
    "tierstep fp32": 28,
    "torch fused fp32": 28,
    "torch fused bf16 + casts": 40,
    "DeepSpeedCPUAdam fp32": 28,
    "the same traffic, no arithmetic": 26,
    "copy": 8,
}
LIMITS = ("the same traffic, no arithmetic", "copy")


def main() -> None:
    """Run the benchmark."""
    options = _options()
    numel = int(options.params)
    torch.set_num_threads(options.threads)
    samples = take_turns(_contestants(numel, options), options.repeats)
    rates = {name: _rate(name, numel, seconds) for name, seconds in samples.items()}
    _show(rates, numel, options.threads)
    publish(
        "kernel", {"params": numel, "threads": options.threads, "rates": rates, "limits": LIMITS, "seconds": samples}
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU update kernels compared")
    parser.add_argument("--params", type=float, default=50e6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--deepspeed", action="store_true", help="take DeepSpeedCPUAdam in; compiles the first time")
    return parser.parse_args()


def _contestants(numel: int, options: argparse.Namespace) -> dict[str, Work]:
    kernel = cpu_kernel()
    found = {
        "tierstep bf16": own_kernel(kernel, numel, torch.bfloat16, options.threads),
        "torch fused fp32": torch_fused(numel),
        "tierstep fp32": own_kernel(kernel, numel, torch.float32, options.threads),
        "torch fused bf16 + casts": torch_fused_with_casts(numel),
        "the same traffic, no arithmetic": same_traffic(numel, options.threads),
        "copy": memory_copy(4 * numel, options.threads),
    }
    if options.deepspeed:
        found["DeepSpeedCPUAdam fp32"] = deepspeed_cpu_adam(numel)
    return found


def _rate(name: str, numel: int, seconds: list[float]) -> dict[str, float]:
    parameters = numel / median(seconds)
    return {"params_per_second": parameters, "bytes_per_second": parameters * BYTES_PER_PARAMETER[name]}


def _show(rates: Mapping[str, Mapping[str, Any]], numel: int, threads: int) -> None:
    limit = max(rates[name]["bytes_per_second"] for name in LIMITS)
    print(f"{numel / 1e6:.0f} M parameters, {threads} threads; limit of memory: {limit / 1e9:.1f} GB/s, read + written")
    print(f"{'':34}{'M params/s':>12}{'GB/s':>8}{'of limit':>9}")
    for name, rate in rates.items():
        share = rate["bytes_per_second"] / limit
        print(f"{name:34}{rate['params_per_second'] / 1e6:12.0f}{rate['bytes_per_second'] / 1e9:8.1f}{share:9.0%}")


if __name__ == "__main__":
    main()
