"""Checkpoints of a small model in every dtype, with a buffer, a tied and a frozen weight, for export and import."""

from __future__ import annotations

import torch

import tierstep
from tierstep import Tiers

SHAPES = {
    "embed": ((40, 16), torch.bfloat16),
    "norm": ((16,), torch.bfloat16),
    "fp16": ((8, 9), torch.float16),
    "frozen": ((5,), torch.float32),
    "head": ((16, 33), torch.float32),
    "bias": ((1,), torch.float32),
    "scalar": ((), torch.float32),
    "unused": ((3, 2), torch.bfloat16),
}


class Model(torch.nn.Module):
    def __init__(self, seed=0, dtype=None):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, (shape, own) in SHAPES.items():
            values = torch.randn(shape, generator=generator).to(dtype or own)
            self.register_parameter(name, torch.nn.Parameter(values))
        self.frozen.requires_grad_(False)
        self.tied = self.embed
        self.register_buffer("seen", torch.tensor([seed]))

    def groups(self):
        named = list(self.named_parameters())
        return [{"params": named[:4], "lr": 0.01}, {"params": named[4:], "weight_decay": 0.5}]


def mixed_tiers(path):
    path.mkdir(exist_ok=True)
    return Tiers(gpu=2500, ram=9_500, nvme=[path], subgroup=1000, slots=2)


def start(tiers=None, seed=0):
    model = Model(seed)
    return model, tierstep.AdamW(model.groups(), betas=(0.9, 0.95), tiers=tiers or Tiers(gpu=0, ram=1 << 20))


def train(model, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 + step)
        for name, parameter in model.named_parameters():
            if name != "unused" and parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.step()
        optimizer.zero_grad()


def fp32_masters(model, optimizer):
    """The exact fp32 weights, from the optimizer's own state."""
    found = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        if "low" in state:
            high = parameter.detach().view(torch.int16).to(torch.int32) << 16
            found[name] = (high + state["low"].to(torch.int32)).view(torch.float32)
        else:
            found[name] = state.get("master", parameter.detach().float())
    return found


def saved(tmp_path, steps=3):
    """Return a trained model, its optimizer, and the folder of a checkpoint of both."""
    model, optimizer = start(mixed_tiers(tmp_path / "nvme"))
    train(model, optimizer, 0, steps)
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    return model, optimizer, checkpoints.save(steps, model=model, optimizer=optimizer, extra={"done": steps}).wait()
