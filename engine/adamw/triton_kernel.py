"""The update on a GPU, in Triton. Import it only where Triton is installed: `kernels.gpu_kernel` sees to that.

Rounds every fp32 operation on its own, as the other kernels do: `enable_fp_fusion=False`, and IEEE roots and quotients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from tierstep.engine.adamw.piece import Piece
from tierstep.engine.adamw.reference import BLOCK, LANES, NAN_BITS

UPDATE_BLOCK = 1024  # elements of one program
SQUARES_BLOCKS = 16  # blocks of 4096 elements of one program
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as the kernels' constants

BF16 = tl.constexpr(0)
FP16 = tl.constexpr(1)
CANONICAL_NAN = tl.constexpr(NAN_BITS)
HALF_NAN = tl.constexpr(0x7E00)
BLOCK_ELEMENTS = tl.constexpr(BLOCK)
LANE_COUNT = tl.constexpr(LANES)


class TritonKernel:
    """See `UpdateKernel`. Enqueues one launch a piece on torch's current stream, and waits for nothing."""

    name = "triton"

    def update(self, pieces: Sequence[Piece], fields: Mapping[str, torch.Tensor], *, threads: int = 1) -> None:
        """See `UpdateKernel.update`; for tensors on a CUDA device."""
        for piece in pieces:
            length = piece.weight.numel()
            here = {name: field[piece.start : piece.start + length] for name, field in fields.items()}
            exp_avg, exp_avg_sq = here["exp_avg"], here["exp_avg_sq"]
            rest = here.get("low", here.get("master", exp_avg))  # fp32 weights have neither; the kernel looks at none
            _update[(triton.cdiv(length, UPDATE_BLOCK),)](
                _bits(piece.weight),
                _bits(piece.grad),
                rest,
                exp_avg,
                exp_avg_sq,
                length,
                *piece.scalars.values(),
                WEIGHT=KINDS[piece.weight.dtype],
                GRAD=KINDS[piece.grad.dtype],
                BLOCK=UPDATE_BLOCK,
                enable_fp_fusion=False,
            )

    def sum_squares(self, values: torch.Tensor, *, threads: int = 1) -> torch.Tensor:
        """See `UpdateKernel.sum_squares`."""
        blocks = triton.cdiv(values.numel(), BLOCK)
        sums = torch.empty(blocks, dtype=torch.float64, device=values.device)
        if blocks:
            _sum_squares[(triton.cdiv(blocks, SQUARES_BLOCKS),)](
                _bits(values),
                sums,
                values.numel(),
                blocks,
                KIND=KINDS[values.dtype],
                BLOCKS=SQUARES_BLOCKS,
                enable_fp_fusion=False,
            )
        return sums


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return 16-bit numbers as integers, which are widened by shifting: no conversion touches a NaN's bits."""
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


@triton.jit
def _widen(value, KIND: tl.constexpr):
    if KIND == BF16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _one_nan(value):
    return tl.where(value != value, CANONICAL_NAN, value.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _half_bits(value):
    """Round to fp16; all NaNs become the same."""
    return tl.where(value != value, HALF_NAN, value.to(tl.float16).to(tl.int16, bitcast=True)).to(tl.int16)


@triton.jit  # compiled once for lengths that are multiples of 16, whose loads are wide, and once for others
def _update(
    weight_pointer, grad_pointer, rest_pointer, exp_avg_pointer, exp_avg_sq_pointer, n,
    decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_bias2, eps, grad_scale,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    weight = tl.load(weight_pointer + at, mask=inside)
    if WEIGHT == BF16:
        high = weight.to(tl.int32)
        low = tl.load(rest_pointer + at, mask=inside).to(tl.int32)
        low = tl.where(((high & 0x7FFF) == 0) & (low < 0), 0, low)
        master = ((high << 16) + low).to(tl.float32, bitcast=True)
    elif WEIGHT == FP16:
        master = tl.load(rest_pointer + at, mask=inside)
        same = _half_bits(master) == weight.to(tl.int16, bitcast=True)
        master = tl.where(same, master, weight.to(tl.float32))
    else:
        master = weight
    g = _widen(tl.load(grad_pointer + at, mask=inside), GRAD) * grad_scale
    decayed = master * decay
    m = tl.load(exp_avg_pointer + at, mask=inside) * beta1 + g * one_minus_beta1
    v = tl.load(exp_avg_sq_pointer + at, mask=inside) * beta2 + (g * g) * one_minus_beta2
    denominator = tl.sqrt_rn(v) * inv_sqrt_bias2 + eps
    master = _one_nan(decayed - tl.div_rn(m, denominator) * step_size)
    tl.store(exp_avg_pointer + at, _one_nan(m), mask=inside)
    tl.store(exp_avg_sq_pointer + at, _one_nan(v), mask=inside)
    if WEIGHT == BF16:
        bits = master.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(weight_pointer + at, high.to(tl.int16), mask=inside)
        tl.store(rest_pointer + at, (bits - (high << 16)).to(tl.int16), mask=inside)
    elif WEIGHT == FP16:
        tl.store(weight_pointer + at, _half_bits(master).to(tl.float16, bitcast=True), mask=inside)
        tl.store(rest_pointer + at, master, mask=inside)
    else:
        tl.store(weight_pointer + at, master, mask=inside)


@triton.jit(do_not_specialize=["n", "blocks"])
def _sum_squares(values_pointer, sums_pointer, n, blocks, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Element i of a block goes to accumulator i mod 16, in order; then accumulators are added in halves."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    start = block[:, None] * BLOCK_ELEMENTS + tl.arange(0, LANE_COUNT)[None, :]
    sums = tl.zeros([BLOCKS, LANE_COUNT], tl.float64)
    for row in range(BLOCK_ELEMENTS // LANE_COUNT):
        at = start + row * LANE_COUNT
        value = _widen(tl.load(values_pointer + at, mask=at < n, other=0), KIND).to(tl.float64)
        sums += value * value
    for fold in tl.static_range(4):
        left, right = tl.split(sums.reshape(BLOCKS, 2, LANE_COUNT >> (fold + 1)).permute(0, 2, 1))
        sums = left + right
    tl.store(sums_pointer + block, sums.reshape(BLOCKS), mask=block < blocks)
