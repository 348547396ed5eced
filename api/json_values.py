"""What the commands print for programs: plain values under stable names."""

from __future__ import annotations

import dataclasses
from typing import Any

from tierstep.forecast import Forecast
from tierstep.results import TrainResult


def result_values(result: TrainResult) -> dict[str, Any]:
    """Return what `tierstep train` prints in its last line; seconds, bytes, and losses of this part of the run."""
    return {
        "command": "train",
        "steps": result.steps,
        "first_step": result.first_step,
        "parameters": result.plan.numel,
        "first_loss": result.losses[0] if result.losses else None,
        "last_loss": result.losses[-1] if result.losses else None,
        "last_loss_hex": result.losses[-1].hex() if result.losses else None,
        "tokens_per_second": result.tokens_per_second,
        "seconds": dataclasses.asdict(result.times),
        "tier_bytes": result.tier_bytes,
        "lanes": {lane: dataclasses.asdict(work) for lane, work in result.lanes.items()},
        "stall_seconds": result.stalls,
        "bytes_written_per_step": result.bytes_written_per_step,
        "terabytes_written_per_day": result.terabytes_written_per_day,
        "moved_bytes": result.moved_bytes,
        "peak_rss_bytes": result.peak_rss_bytes,
        "checkpoint": result.checkpoint,
        "stopped_by": result.stopped_by,
    }


def forecast_values(found: Forecast) -> dict[str, Any]:
    """Return what `tierstep plan --json` prints; seconds and bytes."""
    plan = found.plan
    return {
        "command": "plan",
        "parameters": plan.numel,
        "tier_bytes": plan.state_bytes,
        "records": {tier: plan.homes.count(tier) for tier in plan.state_bytes},
        "slots": {"count": plan.slot_count, "bytes": plan.slots_bytes},
        "pinned_bytes": plan.pinned_bytes,
        "disk_bytes": plan.disk_bytes,
        "weight_bytes": plan.weight_bytes,
        "gradient_bytes": found.gradient_bytes,
        "activation_bytes": found.activation_bytes,
        "base_bytes": found.base_bytes,
        "hole_bytes": found.hole_bytes,
        "peak_rss_bytes": found.peak_rss_bytes,
        "bytes_read_per_step": plan.moved_bytes_per_step,
        "bytes_written_per_step": plan.moved_bytes_per_step,
        "bytes_written_by_run": found.run_written_bytes,
        "step_seconds": None if found.step is None else found.step.seconds,
        "least_step_seconds": None if found.step is None else found.step.limit.seconds,
        "most_terabytes_written_per_day": found.most_terabytes_per_day,
        "rates": None if found.rates is None else dataclasses.asdict(found.rates),
    }
