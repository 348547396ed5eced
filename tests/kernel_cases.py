"""Inputs and outcomes on which all implementations of the update have to agree, on any device."""

from __future__ import annotations

import torch

from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.adamw.formula import scalars
from tierstep.engine.adamw.piece import Piece

from training_runs import bits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HYPERPARAMETERS = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def values(seed, numel, dtype, *, exponents):
    """Normal numbers times powers of two over a wide range, with zeros and denormals among them."""
    g = generator(seed)
    scale = torch.randint(*exponents, (numel,), generator=g).double()
    found = torch.randn(numel, generator=g).double() * torch.exp2(scale)
    found[torch.randint(0, numel, (numel // 7 + 1,), generator=g)] = 0.0
    return found.to(dtype)


def start(numel, dtype, seed=0):
    weight = values(seed, numel, dtype, exponents=(-12, 4))
    return weight, {name: torch.zeros(numel, dtype=d) for name, d in record_fields(dtype)}


def updates(kernel, numel, weight_dtype, grad_dtype, *, steps=4, threads=1, cuts=(), exponents=(-60, 20), device="cpu"):
    """Return all bits after some updates of a record in pieces cut at `cuts`."""
    weight, fields = start(numel, weight_dtype)
    weight, fields = weight.to(device), {name: field.to(device) for name, field in fields.items()}
    edges = [0, *sorted(c % numel for c in cuts), numel]
    for step in range(1, steps + 1):
        grad = values(step, numel, grad_dtype, exponents=exponents)
        grad[~torch.isfinite(grad)] = 1.0
        grad = grad.to(device)
        numbers = scalars(**HYPERPARAMETERS, step=step, grad_scale=0.5)
        pieces = [Piece(weight[a:b], grad[a:b], a, numbers) for a, b in zip(edges, edges[1:], strict=False) if a < b]
        kernel.update(pieces, fields, threads=threads)
    return {"weight": bits(weight.cpu()), **{name: bits(f.cpu()) for name, f in fields.items()}}


def every_special_value(kernel, weight_dtype, grad_dtype, device="cpu"):
    """Return all bits after updates in which weights, gradients and moments are inf, nan, huge, zero and denormal."""
    special = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 1e-45, 1e-39, 6e-8, 65504.0, 3e38, -3e38, torch.inf, -torch.inf, torch.nan]
    )
    weight, grad, m, v = (part.reshape(-1).to(device) for part in torch.meshgrid(*[special] * 4, indexing="ij"))
    weight, grad = weight.to(weight_dtype), grad.to(grad_dtype)
    fields = {name: torch.zeros(len(weight), dtype=d, device=device) for name, d in record_fields(weight_dtype)}
    fields["exp_avg"].copy_(m)
    fields["exp_avg_sq"].copy_(v.abs())
    for step in (1, 2):
        kernel.update([Piece(weight, grad, 0, scalars(**HYPERPARAMETERS, step=step))], fields, threads=1)
    return {"weight": bits(weight.cpu()), **{name: bits(f.cpu()) for name, f in fields.items()}}
