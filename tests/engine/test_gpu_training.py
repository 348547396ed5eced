"""Training on a CUDA device: the bits of the CPU, whatever the schedule and the budgets, and no hidden waiting."""

import pytest
import torch

import tierstep

from training_runs import OPTIONS, STATE_BYTES, make_parameters, outcome, run, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def expected():
    return run(tierstep.Tiers(), steps=30)


def run_on_gpu(tiers, steps=30):
    parameters = make_parameters(device="cuda")
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers) as optimizer:
        train(optimizer, parameters, 0, steps)
        return outcome(optimizer, parameters)


@pytest.mark.parametrize("schedule", ["greedy", "stride", "cpu", "gpu"])
@pytest.mark.parametrize("gpu", [None, "3KiB", 2 * STATE_BYTES])
@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_every_schedule_and_budget_gives_the_bits_of_the_cpu(expected, schedule, gpu, files, kernel, tmp_path):
    ram, nvme = (17_000, [tmp_path]) if files else (None, ())
    tiers = tierstep.Tiers(
        gpu=gpu, ram=ram, nvme=nvme, subgroup=640, slots=3 if files else None, schedule=schedule, kernel=kernel
    )
    assert run_on_gpu(tiers) == expected


def test_a_checkpoint_moves_between_cpu_and_gpu_in_every_bit(expected, tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path)
    on_gpu = make_parameters(device="cuda")
    with tierstep.AdamW(on_gpu.items(), **OPTIONS, tiers=tierstep.Tiers(gpu="4KiB", subgroup=640)) as optimizer:
        train(optimizer, on_gpu, 0, 10)
        checkpoints.save(10, model=torch.nn.ParameterDict(_safe(on_gpu)), optimizer=optimizer).wait()
    on_cpu = make_parameters(seed=1)
    with tierstep.AdamW(on_cpu.items(), **OPTIONS) as optimizer:
        checkpoints.restore(model=torch.nn.ParameterDict(_safe(on_cpu)), optimizer=optimizer)
        train(optimizer, on_cpu, 10, 20)
        checkpoints.save(20, model=torch.nn.ParameterDict(_safe(on_cpu)), optimizer=optimizer).wait()
    back = make_parameters(seed=2, device="cuda")
    with tierstep.AdamW(back.items(), **OPTIONS, tiers=tierstep.Tiers(schedule="gpu", subgroup=400)) as optimizer:
        checkpoints.restore(model=torch.nn.ParameterDict(_safe(back)), optimizer=optimizer)
        train(optimizer, back, 20, 30)
        assert outcome(optimizer, back) == expected


def _safe(parameters):
    return {name.replace(".", "_"): parameter for name, parameter in parameters.items()}


@pytest.mark.parametrize("schedule", ["greedy", "stride", "cpu", "gpu"])
@pytest.mark.parametrize("gpu", [None, "64KiB"])
def test_no_step_waits_behind_the_programmers_back(schedule, gpu):
    """torch raises here for every operation that blocks the host until the device has come that far."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(30_000, device="cuda").bfloat16())
    tiers = tierstep.Tiers(gpu=gpu, subgroup="8KiB", schedule=schedule)
    with tierstep.AdamW([parameter], tiers=tiers) as optimizer:
        gradients = [torch.randn_like(parameter) for _ in range(4)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for gradient in gradients:
                parameter.grad = gradient
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            for gradient in gradients:
                parameter.grad = gradient
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_gradients_that_backward_is_still_computing_are_waited_for():
    """The step begins while the device is busy with the matrix products that the gradients come from."""
    results = []
    for wait in (True, False):
        torch.manual_seed(0)
        layer = torch.nn.Linear(2048, 2048, bias=False, device="cuda", dtype=torch.bfloat16)
        with tierstep.AdamW(layer.parameters(), lr=1e-2, tiers=tierstep.Tiers(subgroup="1MiB")) as optimizer:
            for _ in range(3):
                values = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16) / 64
                for _ in range(30):
                    values = layer(values)
                values.float().pow(2).mean().backward()
                if wait:
                    torch.cuda.synchronize()
                optimizer.step()
                optimizer.zero_grad()
            results.append((layer.weight.detach().cpu(), optimizer.state[layer.weight]["exp_avg"]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_pinned_memory_is_given_back():
    parameter = torch.nn.Parameter(torch.zeros(1_000_000, device="cuda").bfloat16())
    for _ in range(5):  # an address that stayed pinned would be refused the second time
        with tierstep.AdamW([parameter]) as optimizer:
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert optimizer.report().updated["gpu"]


@pytest.mark.slow
def test_twenty_steps_of_four_hundred_million_parameters():
    """Ragged subgroups of a real size; the same weights and moments on both processors, on one, and on the CPU."""
    outcomes = set()
    for device, tiers in (
        ("cuda", tierstep.Tiers(subgroup="64MiB")),
        ("cuda", tierstep.Tiers(subgroup="48MiB", schedule="gpu", gpu="1GiB")),
        ("cuda", tierstep.Tiers(subgroup="100MiB", schedule="cpu")),
        ("cpu", tierstep.Tiers(subgroup="64MiB")),
    ):
        generator = torch.Generator().manual_seed(0)
        parameters = [
            torch.nn.Parameter((torch.randn(n, generator=generator) / 50).bfloat16().to(device))
            for n in (150_000_001, 100_000_000, 49_999_999, 77, 100_000_123)
        ]
        with tierstep.AdamW(parameters, lr=1e-3, weight_decay=0.1, tiers=tiers) as optimizer:
            for step in range(20):
                for parameter in parameters:
                    step_generator = torch.Generator().manual_seed(step)
                    small = torch.randn(1 << 20, generator=step_generator).bfloat16().to(device)
                    parameter.grad = small.repeat(-(-parameter.numel() // len(small)))[: parameter.numel()].clone()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            moments = [optimizer.state[parameter] for parameter in parameters]
            found = [t for p, m in zip(parameters, moments, strict=True) for t in (p.detach().cpu(), *m.values())]
            outcomes.add(tuple(_digest(tensor) for tensor in found))
    assert len(outcomes) == 1


def _digest(tensor):
    import xxhash

    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy())
