"""The compiled kernel equals the reference in every bit, on any input."""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, HYPERPARAMETERS, every_special_value, start, updates, values

from tierstep.engine.adamw import cpu_kernel
from tierstep.engine.adamw.fields import record_fields
from tierstep.engine.adamw.formula import scalars
from tierstep.engine.adamw.native import NativeKernel, status
from tierstep.engine.adamw.piece import Piece
from tierstep.engine.adamw.reference import ReferenceKernel
from tierstep.errors import ConfigError

from training_runs import bits

SIZES = (1, 3, 127, 511, 512, 513, 4095, 4096, 4097, 100_003)
REFERENCE = ReferenceKernel()

needs_native = pytest.mark.skipif(not shutil.which("g++"), reason="no compiler here, so there is no native kernel")


@pytest.fixture(scope="module")
def native():
    return NativeKernel()


@needs_native
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_native_equals_the_reference(native, numel, weight_dtype, grad_dtype):
    expected = updates(REFERENCE, numel, weight_dtype, grad_dtype)
    for threads in (1, 2, 3):
        assert updates(native, numel, weight_dtype, grad_dtype, threads=threads) == expected


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    threads=st.integers(1, 3),
    lowest=st.integers(-150, 30),
)
def test_native_equals_the_reference_for_any_pieces_and_magnitudes(numel, cuts, dtypes, threads, lowest):
    exponents = (lowest, lowest + 60)
    expected = updates(REFERENCE, numel, *dtypes, exponents=exponents)
    assert updates(NativeKernel(), numel, *dtypes, threads=threads, cuts=cuts, exponents=exponents) == expected


@needs_native
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_special_values_come_out_alike_in_every_bit(native, weight_dtype, grad_dtype):
    expected = every_special_value(REFERENCE, weight_dtype, grad_dtype)
    assert every_special_value(native, weight_dtype, grad_dtype) == expected


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_inf_and_nan_come_out_alike(native, dtype):
    results = []
    for kernel in (REFERENCE, native):
        weight, fields = start(64, dtype)
        grad = torch.ones(64, dtype=dtype)
        grad[3], grad[5], grad[7] = math.inf, -math.inf, math.nan
        kernel.update([Piece(weight, grad, 0, scalars(**HYPERPARAMETERS, step=1))], fields, threads=1)
        results.append([weight.isnan().tolist(), *(f.float().isnan().tolist() for f in fields.values())])
    assert results[0] == results[1]


@needs_native
def test_flushing_denormals_in_the_caller_changes_nothing(native):
    results = []
    for flush in (False, True):
        weight, fields = start(5000, torch.float32)
        grad = values(1, 5000, torch.float32, exponents=(-140, -120))
        assert torch.set_flush_denormal(flush)
        try:
            native.update([Piece(weight, grad, 0, scalars(**HYPERPARAMETERS, step=1))], fields, threads=2)
        finally:
            torch.set_flush_denormal(False)
        results.append([bits(weight), *(bits(field) for field in fields.values())])
    assert fields["exp_avg"].abs().min() < 1e-39
    assert results[0] == results[1]


@pytest.mark.parametrize("kernel", [REFERENCE, pytest.param("native", marks=needs_native)])
def test_a_bf16_weight_and_its_low_half_are_an_fp32_master(kernel):
    """The split loses nothing: bf16 training is fp32 training, with rounded weights for the model."""
    kernel = cpu_kernel(kernel) if isinstance(kernel, str) else kernel
    half, fields = start(2000, torch.bfloat16)
    master, full = half.float(), start(2000, torch.float32)[1]
    for step in range(1, 30):
        grad = values(step, 2000, torch.bfloat16, exponents=(-20, 3))
        numbers = scalars(**HYPERPARAMETERS, step=step)
        kernel.update([Piece(half, grad, 0, numbers)], fields, threads=1)
        kernel.update([Piece(master, grad, 0, numbers)], full, threads=1)
    joined = (half.view(torch.int16).to(torch.int32) << 16) + fields["low"].to(torch.int32)
    assert bits(joined) == bits(master)
    assert bits(fields["exp_avg_sq"]) == bits(full["exp_avg_sq"])


@pytest.mark.parametrize("kernel", [REFERENCE, pytest.param("native", marks=needs_native)])
def test_an_fp16_weight_that_was_set_from_outside_wins_over_its_master(kernel):
    kernel = cpu_kernel(kernel) if isinstance(kernel, str) else kernel
    weight, fields = start(8, torch.float16)
    still = scalars(lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step=1)
    fields["master"].copy_(weight.float() + 1e-6)
    weight[3], weight[4] = 7.0, -0.0
    kernel.update([Piece(weight, torch.zeros(8, dtype=torch.float16), 0, still)], fields, threads=1)
    assert weight[3] == fields["master"][3] == 7.0
    assert bits(weight[4:5]) == bits(torch.tensor([-0.0], dtype=torch.float16))


@pytest.mark.parametrize("kernel", [REFERENCE, pytest.param("native", marks=needs_native)])
def test_bf16_weights_set_to_zero_from_outside_go_on_learning(kernel):
    """A zero above a negative low half is the bits of a NaN, which rounds to zero again: such weights never moved."""
    kernel = cpu_kernel(kernel) if isinstance(kernel, str) else kernel
    weight, fields = start(2000, torch.bfloat16)
    grad = torch.ones(2000, dtype=torch.bfloat16)
    kernel.update([Piece(weight, grad, 0, scalars(**HYPERPARAMETERS, step=1))], fields, threads=1)
    assert (fields["low"] < 0).any()
    weight[:1000], weight[1000:] = 0.0, -0.0
    kernel.update([Piece(weight, grad, 0, scalars(**HYPERPARAMETERS, step=2))], fields, threads=1)
    assert torch.allclose(weight.float(), torch.tensor(-0.01), rtol=0.01)


@pytest.mark.parametrize("kernel", [REFERENCE, pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nan_bits", [0x7FC00000, 0x7FFFFFFF, -1])
def test_a_nan_gradient_leaves_a_nan_weight_whatever_its_bits(kernel, dtype, nan_bits):
    """GPUs make the NaN 0x7fffffff, whose upper half, rounded, is a zero."""
    kernel = cpu_kernel(kernel) if isinstance(kernel, str) else kernel
    weight, fields = start(100, dtype)
    grad = torch.full((100,), nan_bits, dtype=torch.int32).view(torch.float32)
    kernel.update([Piece(weight, grad, 0, scalars(**HYPERPARAMETERS, step=1))], fields, threads=1)
    assert weight.isnan().all()


@needs_native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_can_use_the_kernel_that_its_parent_used_on_two_threads():
    """The threads of GNU OpenMP do not exist in a child, which waited for them for ever."""
    code = (
        "import os, signal, torch, warnings; warnings.simplefilter('ignore', DeprecationWarning)\n"
        "from tierstep.engine.adamw import cpu_kernel\n"
        "kernel, ones = cpu_kernel('native'), torch.ones(1_000_000)\n"
        "kernel.sum_squares(ones, threads=2)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    signal.alarm(10)\n"
        "    os._exit(0 if kernel.sum_squares(ones, threads=2).sum() == 1_000_000 else 1)\n"
        "print(os.waitpid(child, 0)[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


@needs_native
def test_every_fp16_number_is_widened_and_narrowed_exactly(native):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[torch.isfinite(every)].clone()
    fields = {name: torch.zeros(finite.numel(), dtype=d) for name, d in record_fields(torch.float16)}
    still = scalars(lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step=1)
    expected = bits(finite)
    native.update([Piece(finite, torch.zeros_like(finite), 0, still)], fields, threads=1)
    assert bits(finite) == expected
    assert torch.equal(fields["master"], finite.float())


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 15, 4095, 4096, 4097, 50_001])
def test_the_sum_of_squares_is_the_same_for_all(native, numel, dtype):
    sample = values(1, numel, dtype, exponents=(-10, 7)) if numel else torch.zeros(0, dtype=dtype)
    expected = REFERENCE.sum_squares(sample)
    for threads in (1, 2, 3):
        assert bits(native.sum_squares(sample, threads=threads)) == bits(expected)
    assert math.fsum(expected.tolist()) == pytest.approx(float(sample.double().square().sum()), rel=1e-12)


@pytest.mark.parametrize("kernel", [REFERENCE, pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_value_is_found_wherever_it_is(kernel, dtype, bad):
    kernel = cpu_kernel(kernel) if isinstance(kernel, str) else kernel
    sample = torch.full((10_001,), torch.finfo(dtype).max, dtype=dtype)
    assert kernel.all_finite(sample, threads=2)
    for place in (0, 4095, 4096, 10_000):
        broken = sample.clone()
        broken[place] = bad
        assert not kernel.all_finite(broken, threads=2)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ConfigError, match="kernel 'fast' is unknown"):
        cpu_kernel("fast")


def test_the_environment_chooses_the_kernel():
    code = "from tierstep.engine.adamw import cpu_kernel; print(cpu_kernel().name)"
    environment = {**os.environ, "TIERSTEP_KERNEL": "reference"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "reference"


def test_without_a_library_the_reference_serves_and_native_says_why(monkeypatch):
    """E2 (DS#1077): no compiler at install time."""
    monkeypatch.setattr("tierstep.engine.adamw.native._load", lambda: "it was not built")
    assert not status().available
    assert cpu_kernel().name == "reference"
    with pytest.raises(ConfigError, match="native kernel is not available: it was not built"):
        cpu_kernel("native")
