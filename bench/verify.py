"""What comparing every record with its checksum costs a step whose state is in files.

    python -m tierstep.bench.verify --nvme DIR [--params 200e6] [--repeats 9]

Three optimizers in turns, one for each `verify`. The limit is the checksum alone, over as many bytes as a step reads.
The last line is one JSON object with all raw samples; bench/results/ keeps it.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import torch

from tierstep import AdamW, Tiers
from tierstep.bench.contestants import Work, median, numbers, take_turns
from tierstep.bench.provenance import publish
from tierstep.configs.schema import Verify
from tierstep.tiers.record import checksum_of
from tierstep.tiers.slots import Arena

SUBGROUP_BYTES = 32 << 20
SLOTS = 8


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="the cost of verify")
    parser.add_argument("--params", type=float, default=200e6)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on a fast drive")
    options = parser.parse_args()
    numel = int(options.params)
    with ExitStack() as resources:
        contestants: dict[str, Work] = {}
        for verify in get_args(Verify):
            tiers = Tiers(
                gpu=0,
                ram=SLOTS * (SUBGROUP_BYTES + 4096),
                nvme=[options.nvme],
                subgroup=SUBGROUP_BYTES,
                slots=SLOTS,
                verify=verify,
            )
            parameter = torch.nn.Parameter(numbers(numel, torch.bfloat16))
            parameter.grad = numbers(numel, torch.bfloat16)
            optimizer = resources.enter_context(AdamW([parameter], tiers=tiers))
            for _ in range(3):
                optimizer.step()
            contestants[verify] = optimizer.step
        moved = optimizer.plan.moved_bytes_per_step
        memory = Arena(SUBGROUP_BYTES).cut(SUBGROUP_BYTES)[1]
        contestants["checksum alone"] = lambda: [checksum_of(memory) for _ in range(moved // SUBGROUP_BYTES)]
        samples = take_turns(contestants, options.repeats)
    for name, seconds in samples.items():
        print(f"{name:16}{median(seconds) * 1e3:9.1f} ms")
    publish("verify", {"params": numel, "read_bytes": moved, "seconds": samples})


if __name__ == "__main__":
    main()
