"""Run in a process of its own: trains on three tiers and prints what memory, descriptors and I/O it took, as JSON.

usage: memory_run.py DIRECTORY NUMEL STEPS SAVES GPU RAM SLOTS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import tierstep


def status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def io_bytes() -> dict[str, int]:
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {key: int(value) for key, value in lines}


def main() -> None:
    directory, numel, steps, saves, gpu, ram, slots = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(2)
    tiers = tierstep.Tiers(gpu=gpu, ram=ram, nvme=[directory], subgroup=numel, slots=slots)  # ten subgroups
    warm_up(directory)
    parameter = torch.nn.Parameter(torch.randn(numel).to(torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 1e-2)
    before, resident = io_bytes(), status("VmRSS")
    optimizer = tierstep.AdamW([("w", parameter)], tiers=tiers)
    checkpoints = tierstep.Checkpoints(directory / "checkpoints", keep=1)
    samples = []
    for step in range(steps):
        optimizer.step()
        if saves and step % (steps // saves) == 0:
            checkpoints.save(step, optimizer=optimizer, wait=True)
        samples.append((status("VmRSS"), len(os.listdir("/proc/self/fd"))))
    after = io_bytes()
    print(
        json.dumps(
            {
                "planned": optimizer.plan.optimizer_host_bytes,
                "pinned": optimizer.plan.pinned_bytes,
                "resident_before": resident,
                "peak": status("VmHWM"),
                "samples": samples,
                "read": after["read_bytes"] - before["read_bytes"],
                "written": after["write_bytes"] - before["write_bytes"],
                "counted": optimizer.moved_bytes(),
                "tiers": optimizer.placement(),
            }
        )
    )


def warm_up(directory: Path) -> None:
    """Touch all code once, so that what is measured later is state and not libraries."""
    small = torch.nn.Parameter(torch.randn(9000).to(torch.bfloat16))
    small.grad = torch.ones_like(small)
    with tierstep.AdamW([small], tiers=tierstep.Tiers(gpu=0, ram=40960, nvme=[directory], subgroup=20_000)) as warm:
        for _ in range(3):
            warm.step()


if __name__ == "__main__":
    main()
