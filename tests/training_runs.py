"""Small training runs with given gradients, for tests that compare their outcomes bit by bit."""

from __future__ import annotations

import torch

import tierstep

SHAPES = {
    "embed.weight": ((40, 16), torch.bfloat16),
    "norm.weight": ((16,), torch.bfloat16),
    "half.weight": ((8, 9), torch.float16),
    "head.weight": ((16, 33), torch.float32),
    "head.bias": ((1,), torch.float32),
}
OPTIONS = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
STATE_BYTES = 40 * 16 * 10 + 16 * 10 + 72 * 12 + 16 * 33 * 8 + 8


def make_parameters(seed: int = 0, device: str = "cpu") -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for name, (shape, dtype) in SHAPES.items()
    }


def set_gradients(parameters: dict[str, torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def train(optimizer, parameters, first: int, last: int, *, clip: bool = True) -> None:
    for step in range(first, last):
        set_gradients(parameters, step)
        if clip:
            optimizer.clip_grad_norm_(10.0)
        optimizer.step()
        optimizer.zero_grad()


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def outcome(optimizer, parameters) -> dict[str, bytes]:
    """Every bit of the weights and of the state."""
    found = {f"weight of {name}": bits(parameter) for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for field, value in optimizer.state.get(parameter, {}).items():
            found[f"{field} of {name}"] = bits(value)
    return found


def run(tiers: tierstep.Tiers, steps: int = 30, **options) -> dict[str, bytes]:
    parameters = make_parameters()
    with tierstep.AdamW(parameters.items(), **{**OPTIONS, **options}, tiers=tiers) as optimizer:
        train(optimizer, parameters, 0, steps)
        return outcome(optimizer, parameters)
