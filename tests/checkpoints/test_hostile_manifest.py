"""A manifest is somebody else's input: whatever it says, restoring is refused as such and nothing is changed."""

import copy
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierstep
from tierstep import Tiers

from checkpoints.hostile import refit, start
from training_runs import outcome, set_gradients, train

QUICK = settings(max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def nested(depth, kind=list):
    value = "end"
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


ODD = [
    None, True, -1, 0, 1, 1 << 59, 1 << 62, 1 << 70, 10**400, -0.5, float("nan"), float("inf"), "", "../x",
    "/etc/passwd",
    "a/../../x", "a\x00b", "\ud800", "x" * 5000, "records", "manifest.json", ".", [], {}, [[]], [None], {"": None},
    {"__tensor__": "x"}, {"__tensor__": []}, {"__tuple__": 3}, {"__dict__": [[1]]}, {"__dict__": [[[], 1]]},
    {"__counter__": {"a": 1}}, "float32", "bfloat16",
]  # fmt: skip
VALUES = st.one_of(st.sampled_from(ODD), st.integers(), st.floats(), st.text(max_size=20))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    (root / "nvme").mkdir()
    parameters, model, optimizer = start(Tiers(gpu=0, ram=9_500, nvme=[root / "nvme"], subgroup=1000))
    with optimizer:
        train(optimizer, parameters, 0, 2)
        extra = {"seen": torch.ones(3), "pair": (1, {2: "b"})}
        return tierstep.Checkpoints(root / "checkpoints").save(2, model=model, optimizer=optimizer, extra=extra).wait()


@pytest.fixture(scope="module")
def manifest(saved):
    return json.loads((saved / "manifest.json").read_text())


def places(value, path=()):
    """Every place of a JSON document, as the keys that lead there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def attempt(saved, hostile):
    """Restore: refused with nothing changed, or taken over as something that trains on. Other errors go through."""
    parameters, model, optimizer = start(Tiers(gpu=0, ram=1 << 20), seed=1)
    train(optimizer, parameters, 5, 6)
    refit(saved, hostile)
    before, random_state = outcome(optimizer, parameters), torch.get_rng_state()
    group = dict(optimizer.param_groups[0])
    try:
        tierstep.Checkpoints(saved.parent / "none").restore(model=model, optimizer=optimizer, path=saved)
    except tierstep.CheckpointError:
        assert outcome(optimizer, parameters) == before
        assert torch.equal(torch.get_rng_state(), random_state)
        assert dict(optimizer.param_groups[0]) == group
        return False
    set_gradients(parameters, 3)
    optimizer.step()
    return True


@QUICK
@given(data=st.data())
def test_any_change_to_a_manifest_is_harmless_or_refused(saved, manifest, data):
    hostile = copy.deepcopy(manifest)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(places(hostile))))
        parent = at(hostile, path[:-1])
        match data.draw(st.sampled_from(["replace", "remove", "swap"])):
            case "replace":
                parent[path[-1]] = data.draw(VALUES)
            case "remove":
                del parent[path[-1]]
            case _:
                parent[path[-1]] = copy.deepcopy(at(hostile, data.draw(st.sampled_from(list(places(hostile))))))
    attempt(saved, hostile)


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("depth", [100, 250, 400, 490, 600, 900])
@pytest.mark.parametrize("key", ["extra", "rng", "states", "optimizer", "tied"])
def test_deep_nesting_is_harmless_or_refused(saved, manifest, key, depth, kind):
    hostile = copy.deepcopy(manifest)
    hostile[key] = {"a": nested(depth, kind)}
    taken = attempt(saved, hostile)
    assert key in ("extra", "states") or not taken


def test_a_number_that_no_random_state_holds_is_refused(saved, manifest):
    hostile = copy.deepcopy(manifest)
    hostile["rng"]["numpy"]["__tuple__"][-1] = 10**400  # an OverflowError from NumPy
    assert not attempt(saved, hostile)


def test_the_sound_manifest_is_taken(saved, manifest):
    assert attempt(saved, manifest)
