"""Steps as the performance model predicts them, beside the same steps measured.

    python -m tierstep.bench.prediction [--nvme DIR] [--params 200e6] [--repeats 9]

For every configuration, rates are measured and the prediction is made before the first step. The last line is one JSON
object with all raw samples; bench/results/ keeps it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tierstep import AdamW, Tiers
from tierstep.bench.contestants import BETAS, EPS, LR, WEIGHT_DECAY, median, numbers
from tierstep.bench.provenance import RESULTS, publish
from tierstep.engine.prediction import expect_step
from tierstep.engine.rates import measure_rates

SUBGROUP_BYTES = 32 << 20
SLOT_BYTES = SUBGROUP_BYTES + (1 << 20)
SLOTS = 8
WARM_UP = 3


def main() -> None:
    """Run the benchmark."""
    options = _options()
    numel = int(options.params)
    results = {}
    for name, settings in _configurations(numel, options.nvme).items():
        results[name] = found = _compare(numel, Tiers(gpu=0, **settings), options.repeats)
        measured, predicted = median(found["seconds"]), found["expected"]["seconds"]
        error = predicted / measured - 1
        print(f"{name:36}{measured * 1e3:9.1f} ms, predicted {predicted * 1e3:9.1f} ms, {error:+.1%}")
    publish("prediction", {"params": numel, "configurations": results}, folder=options.folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="predicted and measured steps")
    parser.add_argument("--params", type=float, default=200e6)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--nvme", type=Path, help="an existing directory on the drive to use")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    return parser.parse_args()


def _configurations(numel: int, nvme: Path | None) -> Mapping[str, dict[str, Any]]:
    """Return settings of `Tiers` by name: processors alone, then shares of the records in files."""
    found: dict[str, dict[str, Any]] = {
        "host tier, 1 thread": {"threads": 1, "subgroup": SUBGROUP_BYTES},
        "host tier, 2 threads": {"threads": 2, "subgroup": SUBGROUP_BYTES},
        "host tier, large subgroups": {"threads": 2, "subgroup": 4 * SUBGROUP_BYTES},
    }
    if nvme is not None:
        records = 12 * numel
        for percent in (0, 25, 50, 75):
            ram = records * percent // 100 + SLOTS * SLOT_BYTES
            found[f"{100 - percent} % in files"] = {
                "ram": ram, "nvme": [nvme], "subgroup": SUBGROUP_BYTES, "slots": SLOTS
            }  # fmt: skip
    return found


def _compare(numel: int, tiers: Tiers, repeats: int) -> dict[str, Any]:
    parameter = torch.nn.Parameter(numbers(numel, torch.bfloat16))
    parameter.grad = numbers(numel, torch.bfloat16)
    named = [("weight", parameter)]
    with AdamW(named, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, tiers=tiers) as optimizer:
        rates = measure_rates(tiers)
        expected = expect_step(optimizer.plan, rates, optimizer.stepper.division)
        seconds, checks = [], []
        for _ in range(WARM_UP + repeats):
            optimizer.step()
            report = optimizer.report()
            if report is None:
                raise RuntimeError("a step leaves a report")
            seconds.append(report.seconds)
            checks.append(report.check_seconds)
    return {
        "tiers": {"threads": tiers.threads, "subgroup": int(tiers.subgroup or 0), "slots": tiers.slots},
        "rates": asdict(rates),
        "expected": {"seconds": expected.seconds, **asdict(expected)},
        "seconds": seconds[WARM_UP:],
        "check_seconds": checks[WARM_UP:],
    }


if __name__ == "__main__":
    main()
