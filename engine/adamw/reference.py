"""The update in plain torch operations: the oracle that the compiled kernels have to equal in every bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tierstep.engine.adamw.piece import Piece

CHUNK = 1 << 20  # elements worked on at once; bounds the temporary memory
BLOCK, LANES = 4096, 16  # of sum_squares
NAN_BITS = 0x7FC00000  # of every NaN, whatever the processor makes; 0x7fffffff, a GPU's, would round to a zero in bf16


class ReferenceKernel:
    """See `CpuKernel`. Uses torch's threads, whatever `threads` says; the bits do not depend on them.

    `torch.set_flush_denormal(True)` would change its results where denormals occur; the compiled kernel is immune.
    """

    name = "reference"

    def update(self, pieces: Sequence[Piece], fields: Mapping[str, torch.Tensor], *, threads: int = 1) -> None:
        """See `CpuKernel.update`."""
        for piece in pieces:
            length = piece.weight.numel()
            for begin in range(0, length, CHUNK):
                end = min(length, begin + CHUNK)
                here = {name: f[piece.start + begin : piece.start + end] for name, f in fields.items()}
                part = piece._replace(weight=piece.weight[begin:end], grad=piece.grad[begin:end])
                _update_chunk(part, here)

    def all_finite(self, values: torch.Tensor, *, threads: int = 1) -> bool:
        """See `CpuKernel.all_finite`."""
        return all(bool(torch.isfinite(chunk).all()) for chunk in torch.split(values, CHUNK))

    def sum_squares(self, values: torch.Tensor, *, threads: int = 1) -> torch.Tensor:
        """See `CpuKernel.sum_squares`. The order of additions within a block is part of the result.

        Element i of a block goes to accumulator i mod 16, in order; then accumulators are added in halves.
        """
        chunks = torch.split(values, CHUNK)  # a multiple of BLOCK
        return torch.cat([_block_sums(chunk) for chunk in chunks]) if values.numel() else values.new_zeros(0).double()


def _update_chunk(piece: Piece, fields: Mapping[str, torch.Tensor]) -> None:
    s = piece.scalars
    exp_avg, exp_avg_sq = fields["exp_avg"], fields["exp_avg_sq"]
    g = piece.grad.float() * s.grad_scale
    decayed = load_master(piece.weight, fields) * s.decay
    exp_avg.copy_(exp_avg * s.beta1 + g * s.one_minus_beta1)
    exp_avg_sq.copy_(exp_avg_sq * s.beta2 + (g * g) * s.one_minus_beta2)
    denominator = _sqrt(exp_avg_sq) * s.inv_sqrt_bias2 + s.eps
    master = decayed - (exp_avg / denominator) * s.step_size
    for values in (master, exp_avg, exp_avg_sq):
        values.view(torch.int32).masked_fill_(values.isnan(), NAN_BITS)
    store_master(piece.weight, fields, master)


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    """Return correctly rounded fp32 square roots.

    torch's own fp32 sqrt is one unit in the last place off now and then where it is built with MKL. A double root of
    an fp32 number is never so close to the middle between two fp32 numbers that its last bits decide the rounding.
    """
    return values.double().sqrt().float()


def load_master(weight: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the fp32 master of flat weights and their fields, of which `low` or `master` is looked at."""
    if weight.dtype == torch.bfloat16:
        high, low = weight.view(torch.int16).to(torch.int32), fields["low"].to(torch.int32)
        set_to_zero = ((high & 0x7FFF) == 0) & (low < 0)  # these bits are no master's: see record_fields
        return ((high << 16) + low.masked_fill(set_to_zero, 0)).view(torch.float32)
    if weight.dtype == torch.float16:
        same = fields["master"].half().view(torch.int16) == weight.view(torch.int16)
        return torch.where(same, fields["master"], weight.float())
    return weight


def store_master(weight: torch.Tensor, fields: Mapping[str, torch.Tensor], master: torch.Tensor) -> None:
    """Round an fp32 master into flat weights, and keep in the fields what that loses."""
    if weight.dtype == torch.bfloat16:
        bits = master.view(torch.int32)
        high = (bits + 0x8000) >> 16
        weight.view(torch.int16).copy_(high)
        fields["low"].copy_(bits - (high << 16))
    elif weight.dtype == torch.float16:
        weight.copy_(master)
        fields["master"].copy_(master)
    else:
        weight.copy_(master)


def _block_sums(values: torch.Tensor) -> torch.Tensor:
    blocks = -(-values.numel() // BLOCK)
    padded = values.new_zeros(blocks * BLOCK, dtype=torch.float64)
    padded[: values.numel()] = values
    rows = padded.view(blocks, BLOCK // LANES, LANES)
    sums = padded.new_zeros(blocks, LANES)
    for row in range(BLOCK // LANES):
        sums += rows[:, row] * rows[:, row]
    half = LANES // 2
    while half:
        sums = sums[:, :half] + sums[:, half : 2 * half]
        half //= 2
    return sums[:, 0]
