"""Ways to train one model on one GPU: each a forward, a backward and a step, to be timed alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tierstep import AdamW, Tiers
from tierstep.bench.models import build_llama, random_tokens
from tierstep.engine.accelerator import accelerator_of
from tierstep.engine.prediction import expect_step
from tierstep.engine.rates import measure_rates

LR = 1e-4


@dataclass(frozen=True)
class Setting:
    """What all contestants train."""

    model: str
    batch: int
    length: int
    accumulation: int
    clip: float
    device: str

    def tokens(self) -> torch.Tensor:
        """Return the tokens of a micro-batch."""
        return random_tokens(self.batch, self.length, self.device)


@dataclass(frozen=True)
class Contestant:
    """A model ready to be trained. `step` clips, updates and clears gradients."""

    parameters: int
    forward: Callable[[], Any]
    backward: Callable[[Any], None]
    step: Callable[[], None]
    describe: Callable[[], dict[str, Any]] = dict
    save_timeline: Callable[[Path], None] = lambda path: None


def build(name: str, setting: Setting) -> Contestant:
    """Return a contestant by name: "torch", "torchao", "deepspeed[:ratio]", or "tierstep[:key=value,…]" of `Tiers`."""
    kind, _, options = name.partition(":")
    builders: dict[str, Callable[[Setting, str], Contestant]] = {
        "torch": _torch,
        "torchao": _torchao,
        "deepspeed": _deepspeed,
        "tierstep": _tierstep,
    }
    return builders[kind](setting, options)


def _plain(setting: Setting, model: torch.nn.Module, step: Callable[[], None], **more: Any) -> Contestant:  # noqa: ANN401
    def forward() -> torch.Tensor:
        tokens = setting.tokens()
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss / setting.accumulation
        return loss

    return Contestant(_count(model), forward, lambda loss: loss.backward(), step, **more)


def _torch(setting: Setting, _: str) -> Contestant:
    """Everything on the GPU: fused AdamW whose state has the dtype of the weights, bf16."""
    model = build_llama(setting.model, setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        if setting.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()

    return _plain(setting, model, step)


def _torchao(setting: Setting, _: str) -> Contestant:
    """CPUOffloadOptimizer: bf16 state, no fp32 master weights, no clipping (it cannot)."""
    from torchao.optim import CPUOffloadOptimizer

    model = build_llama(setting.model, setting.device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, lr=LR)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _plain(setting, model, step)


def _tierstep(setting: Setting, options: str) -> Contestant:
    model = build_llama(setting.model, setting.device)
    chosen = dict(option.split("=") for option in options.split(",") if option)
    tiers = Tiers(**chosen)  # type: ignore[arg-type]
    optimizer = AdamW(model.named_parameters(), lr=LR, tiers=tiers)
    if tiers.overlap == "forward":
        optimizer.attach(model)

    def step() -> None:
        if setting.clip:
            optimizer.clip_grad_norm_(setting.clip)
        optimizer.step()
        optimizer.zero_grad()

    def describe() -> dict[str, Any]:
        optimizer.synchronize()
        report = optimizer.report()
        if report is None:
            return {}
        return {
            "expected": _expected(optimizer, tiers),
            "state_bytes": optimizer.placement(),
            "pinned_bytes": optimizer.plan.pinned_bytes,
            "device_bytes": optimizer.plan.device_bytes,
            "subgroups": len(optimizer.plan.subgroups),
            "last_step": {
                "seconds": report.seconds,
                "check_seconds": report.check_seconds,
                "updated": {lane: len(which) for lane, which in report.updated.items()},
                "lanes": {lane: [share.seconds, share.bytes] for lane, share in report.lanes.items()},
                "stall_seconds": report.stall_seconds,
            },
        }

    def save_timeline(path: Path) -> None:
        timeline = optimizer.trace()
        if timeline is not None:
            timeline.save_json(path.with_suffix(".json"))
            timeline.save_png(path.with_suffix(".png"), title=f"{setting.model}, one step")

    return _plain(setting, model, step, describe=describe, save_timeline=save_timeline)


def _expected(optimizer: AdamW, tiers: Tiers) -> dict[str, Any] | None:
    """Return what the performance model says of the step, from rates measured now."""
    accelerator = accelerator_of(next(iter(optimizer.param_groups[0]["params"])).device)
    if accelerator is None:
        return None
    rates = measure_rates(tiers, accelerator)
    found = expect_step(optimizer.plan, rates, optimizer.stepper.division)
    return {"rates": asdict(rates), "seconds": found.seconds, **asdict(found)}


def _deepspeed(setting: Setting, ratio: str) -> Contestant:
    """ZeRO-3 with its optimizer offloaded to the CPU; with a ratio, Twin-Flow, which keeps the rest on the GPU."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    import deepspeed

    model = build_llama(setting.model, setting.device)
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if ratio:
        offload["ratio"] = float(ratio)
    config = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "gradient_accumulation_steps": setting.accumulation,
        "bf16": {"enabled": True},
        "gradient_clipping": setting.clip,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": int(1e8),
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_bucket_size": int(2e8),
            "stage3_prefetch_bucket_size": int(5e7),
            "stage3_param_persistence_threshold": int(1e9),
            "stage3_max_live_parameters": int(1e10),
            "offload_optimizer": offload,
        },
    }
    parameters = _count(model)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def forward() -> torch.Tensor:
        tokens = setting.tokens()
        loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
        return loss

    return Contestant(parameters, forward, engine.backward, engine.step)


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
