"""M1 to M3 and V1: planned memory is measured memory, nothing grows, and counters agree with the system's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent.parent / "memory_run.py"
MIB = 1 << 20


def measure(directory, *, numel, steps, saves, gpu, ram, slots):
    arguments = [str(a) for a in (directory, numel, steps, saves, gpu, ram, slots)]
    done = subprocess.run([sys.executable, RUN, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_peak_memory_is_what_was_planned(tmp_path):
    """M1: construction and three steps, 200 MiB of state over three tiers."""
    found = measure(tmp_path, numel=20 * MIB, steps=3, saves=0, gpu=42 * MIB, ram=125 * MIB, slots=4)
    assert all(found["tiers"].values())
    planned = found["resident_before"] + found["planned"]
    assert planned * 0.85 <= found["peak"] <= planned * 1.15
    assert found["pinned"] <= 125 * MIB


def test_memory_and_descriptors_stay_flat_over_200_steps_and_10_saves(tmp_path):
    """M3 (DS#5700)."""
    found = measure(tmp_path, numel=MIB, steps=200, saves=10, gpu=2 * MIB, ram=5 * MIB, slots=2)
    resident, descriptors = zip(*found["samples"], strict=True)
    assert max(descriptors[40:]) == max(descriptors[:40])
    assert max(resident[100:]) - max(resident[40:100]) < MIB


def test_counters_agree_with_the_operating_systems(tmp_path):
    """V1: bytes read and written as /proc/self/io has them."""
    found = measure(tmp_path, numel=8 * MIB, steps=6, saves=0, gpu=0, ram=18 * MIB, slots=2)
    counted = found["counted"]
    assert counted["write"] > 200 * MIB
    assert counted["read"] == pytest.approx(found["read"], rel=0.02)
    assert counted["write"] == pytest.approx(found["written"], rel=0.02)


def test_a_new_optimizer_neither_reads_nor_writes_what_it_knows_to_be_zero(tmp_path):
    """V1, by the system's counters: 80 MiB of files are reserved, and none of their bytes is moved."""
    found = measure(tmp_path, numel=8 * MIB, steps=0, saves=0, gpu=0, ram=18 * MIB, slots=2)
    assert found["tiers"]["nvme"] == 80 * MIB
    assert found["counted"] == {"read": 0, "write": 0}
    assert found["written"] < MIB
    assert found["read"] < MIB
