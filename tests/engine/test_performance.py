"""The performance model: limits by hand, and the simulation against what can be worked out by hand."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstep
from tests.fake_accelerator import FakeAccelerator
from tierstep.configs.sizes import parse_bytes
from tierstep.engine.performance import GpuRates, Load, MachineRates, best_stride, least_seconds
from tierstep.engine.plan import Division, plan_step
from tierstep.engine.planning import FreeBytes, plan_memory
from tierstep.engine.prediction import expect_step, loads_of
from tierstep.engine.rates import measure_rates
from tierstep.engine.simulation import Passage, simulate
from tierstep.engine.subgroups import ShardSpec

H200 = MachineRates(update=104e9, memory=144e9, check=3e12, gpu=GpuRates(update=3e12, h2d=55e9, d2h=55e9, both=47e9))
CPU = MachineRates(update=26e9, memory=26e9, check=40e9, files=4e9)
PARAMETERS = 1_000_000
LOAD = Load("host", 10 * PARAMETERS, 2 * PARAMETERS, 2 * PARAMETERS)


PASSAGE = Passage(device_slots=4, staging=2)


def simulated(rates, loads, division=None, passage=PASSAGE, backwards=False, resident=()):
    homes = [load.home for load in loads]
    plan = plan_step(homes, range(len(loads)), resident, passage.slots, backwards=backwards, division=division)
    return simulate(plan, loads, rates, passage, resident)


def test_a_cpu_alone_takes_the_kernels_bytes_over_its_rate():
    assert least_seconds([LOAD] * 10, CPU).seconds == pytest.approx(10e-3)
    assert simulated(CPU, [LOAD] * 10).seconds == pytest.approx(10e-3)
    assert simulated(CPU, [LOAD] * 10).updated == {"gpu": 5, "cpu": 5}


def test_everything_through_the_gpu_takes_its_records_over_the_link():
    limit = least_seconds([LOAD] * 100, H200, Division("gpu"))
    assert (limit.lane, limit.gpu_share) == ("h2d", 1.0)
    assert limit.seconds == pytest.approx(100 * LOAD.record / 47e9)
    found = simulated(H200, [LOAD] * 100, Division("gpu"))
    assert limit.seconds < found.seconds < 1.05 * limit.seconds
    assert found.updated == {"gpu": 100, "cpu": 0}


def test_one_subgroup_through_the_gpu_takes_the_sum_of_its_way():
    found = simulated(H200, [LOAD], Division("gpu"))
    assert found.seconds == pytest.approx(10e6 / 55e9 + 26e6 / 3e12 + 10e6 / 55e9)


def test_one_subgroup_on_the_cpu_takes_the_sum_of_its_way():
    assert simulated(H200, [LOAD], Division("cpu")).seconds == pytest.approx(4e6 / 55e9 + 26e6 / 104e9 + 2e6 / 55e9)


def test_records_on_the_device_cross_no_link():
    resident = dataclasses.replace(LOAD, home="device")
    found = simulated(H200, [resident] * 8, Division())
    assert found.seconds == pytest.approx(8 * 26e6 / 3e12)
    assert set(found.busy_seconds) == {"gpu"}


def test_all_lanes_together_are_slowed_down_by_host_memory():
    slow = dataclasses.replace(H200, memory=60e9)
    assert simulated(slow, [LOAD] * 100, Division()).seconds > 1.5 * simulated(H200, [LOAD] * 100, Division()).seconds
    assert least_seconds([LOAD] * 100, slow, Division()).lane == "memory"


def test_greedy_is_not_slower_than_either_processor_alone():
    greedy, cpu, gpu = (simulated(H200, [LOAD] * 200, Division(s)).seconds for s in ("greedy", "cpu", "gpu"))
    assert greedy < min(cpu, gpu)


def test_files_limit_a_step_whose_records_are_cold():
    cold = dataclasses.replace(LOAD, home="nvme")
    passage = Passage(slots=4)
    found = simulated(CPU, [cold] * 40, passage=passage, resident=range(4))
    moved = 36 * LOAD.record
    limit = least_seconds([cold] * 40, CPU, None, moved)
    assert (limit.lane, limit.seconds) == ("files", pytest.approx(2 * moved / 4e9))
    assert limit.seconds <= found.seconds < 1.1 * limit.seconds


@given(
    homes=st.lists(st.sampled_from(["device", "host", "nvme"]), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 10**8), min_size=20, max_size=20),
    schedule=st.sampled_from(["greedy", "stride", "cpu", "gpu"]),
    slots=st.integers(1, 6),
    device_slots=st.integers(1, 5),
    staging=st.integers(1, 3),
    on_gpu=st.booleans(),
)
def test_every_plan_ends_and_takes_no_less_than_its_limit(homes, sizes, schedule, slots, device_slots, staging, on_gpu):
    rates = dataclasses.replace(H200 if on_gpu else CPU, files=4e9)
    division = Division(schedule) if on_gpu else None
    loads = [Load(home, 10 * size, 2 * size, 2 * size) for home, size in zip(homes, sizes, strict=False)]
    cold = [index for index, home in enumerate(homes) if home == "nvme"]
    resident = cold[:slots]
    found = simulated(rates, loads, division, Passage(device_slots, staging, slots), resident=resident)
    assert sum(found.updated.values()) == len(loads)
    busiest = max(found.busy_seconds.values())
    assert busiest <= found.seconds * (1 + 1e-9)
    read, written = (sum(loads[i].record for i in there) for there in (cold[slots:], cold[: max(0, len(cold) - slots)]))
    if schedule != "stride":  # whose share is counted in subgroups, not in bytes
        one_way = dataclasses.replace(rates, gpu=dataclasses.replace(rates.gpu, both=55e9)) if on_gpu else rates
        assert found.seconds >= least_seconds(loads, one_way, division, (read + written) // 2).seconds * (1 - 1e-2)


def test_the_stride_is_the_papers_closed_form():
    rates = MachineRates(
        update=26 * 1e9, memory=1e12, check=1e12, gpu=GpuRates(update=26 * 50e9, h2d=16e9, d2h=16e9, both=16e9)
    )
    # B = 4 G parameters a second, U_g = 50, U_c = 1: 1 + (0.75 + 0.02) / (1 - 0.125) = 1.88
    assert best_stride(rates, LOAD) == 2
    slower = dataclasses.replace(rates, gpu=dataclasses.replace(rates.gpu, both=4e9))
    assert best_stride(slower, LOAD) == 8  # B = 1: 1 + 3.02 / 0.5 = 7.04


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_plan_is_expected_from_its_own_bytes(dtype, tmp_path):
    tiers = tierstep.Tiers(gpu=0, ram="3MiB", nvme=[tmp_path], subgroup="256KiB", slots=3)
    specs = [ShardSpec(i, 100_000, dtype, 0) for i in range(10)]
    plan = plan_memory(specs, tiers, FreeBytes(1 << 34, (1 << 34,)))
    assert sum(load.weights for load in loads_of(plan)) == plan.weight_bytes
    found = expect_step(plan, CPU, None)
    assert found.limit.lane == "files"
    assert found.limit.seconds == pytest.approx(2 * plan.moved_bytes_per_step / 4e9)
    assert found.step.seconds >= found.limit.seconds
    assert sum(found.step.updated.values()) == len(plan.subgroups)


def test_rates_are_measured_of_everything_at_once():
    found = measure_rates(tierstep.Tiers(), FakeAccelerator())
    assert found.gpu is not None
    assert found.files is None
    rates = (found.update, found.gpu.update, found.gpu.h2d, found.gpu.d2h, found.gpu.both)
    assert all(parse_bytes("10MiB") < rate < 1e15 for rate in rates)
    assert found.memory >= found.update


def test_the_search_for_nan_comes_before_the_lanes():
    specs = [ShardSpec(0, PARAMETERS, torch.bfloat16, 0)]
    plan = plan_memory(specs, tierstep.Tiers(gpu=0), FreeBytes(1 << 34))
    found = expect_step(plan, CPU, None)
    assert found.check_seconds == pytest.approx(2 * PARAMETERS / 40e9)
    assert found.seconds == pytest.approx(found.check_seconds + found.step.seconds)
