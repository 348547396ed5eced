"""The GPU's kernel equals the reference on the CPU in every bit, on any input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, HYPERPARAMETERS, every_special_value, updates, values

from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.adamw.formula import scalars
from tierstep.engine.adamw.kernels import gpu_kernel
from tierstep.engine.adamw.piece import Piece
from tierstep.engine.adamw.reference import ReferenceKernel

from training_runs import bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
REFERENCE = ReferenceKernel()
KERNELS = ["native", "reference"]


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("numel", [1, 3, 1023, 1024, 1025, 100_003])
def test_it_equals_the_reference(name, numel, weight_dtype, grad_dtype):
    expected = updates(REFERENCE, numel, weight_dtype, grad_dtype)
    assert updates(gpu_kernel(name), numel, weight_dtype, grad_dtype, device="cuda") == expected


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_special_values_come_out_alike(name, weight_dtype, grad_dtype):
    expected = every_special_value(REFERENCE, weight_dtype, grad_dtype)
    assert every_special_value(gpu_kernel(name), weight_dtype, grad_dtype, device="cuda") == expected


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    lowest=st.integers(-150, 30),
)
def test_it_equals_the_reference_for_any_pieces_and_magnitudes(numel, cuts, dtypes, lowest):
    exponents = (lowest, lowest + 60)
    expected = updates(REFERENCE, numel, *dtypes, exponents=exponents)
    assert updates(gpu_kernel(), numel, *dtypes, cuts=cuts, exponents=exponents, device="cuda") == expected


def test_it_equals_the_reference_over_twenty_steps_of_millions():
    expected = updates(REFERENCE, 4_000_037, torch.bfloat16, torch.bfloat16, steps=20, exponents=(-40, 7))
    got = updates(gpu_kernel(), 4_000_037, torch.bfloat16, torch.bfloat16, steps=20, exponents=(-40, 7), device="cuda")
    assert got == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("numel", [0, 1, 15, 4095, 4096, 4097, 1_000_003])
def test_sums_of_squares_are_the_same(name, numel, dtype):
    numbers = values(5, max(1, numel), dtype, exponents=(-30, 10))[:numel]
    expected = REFERENCE.sum_squares(numbers)
    assert bits(gpu_kernel(name).sum_squares(numbers.cuda(), threads=1).cpu()) == bits(expected)


def test_neither_the_host_waits_nor_anything_is_compiled_again_from_step_to_step():
    kernel = gpu_kernel("native")
    weight, grad = torch.ones(5000, device="cuda").bfloat16(), torch.ones(5000, device="cuda").bfloat16()
    fields = {n: torch.zeros(5000, dtype=d, device="cuda") for n, d in record_fields(torch.bfloat16)}
    from tierstep.engine.adamw import triton_kernel

    def compiled():
        return sum(len(cache[0]) for cache in triton_kernel._update.device_caches.values())

    counts = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 6):
            numbers = scalars(**HYPERPARAMETERS, step=step)
            kernel.update([Piece(weight[:4096], grad[:4096], 0, numbers)], fields, threads=1)
            kernel.update([Piece(weight[:4001], grad[:4001], 0, numbers)], fields, threads=1)
            counts.append(compiled())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts[0] == counts[-1] > 0
