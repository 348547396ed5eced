"""One call saves everything: scheduler, scaler, data position and extras go with model and optimizer."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler

import tierstep
from tierstep import Tiers

from training_runs import OPTIONS, make_parameters, outcome, train

STEPS = 3
SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, 20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)]
    ),
}


class Numbers:
    """Yields numbers in an order of its own and knows where it is, as torchdata's StatefulDataLoader does."""

    def __init__(self, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        self.given = []

    def __next__(self):
        self.given.append(int(torch.randint(1000, (), generator=self.generator)))
        return self.given[-1]

    def state_dict(self):
        return {"generator": self.generator.get_state(), "given": list(self.given), "worker_0": None}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.given = state["given"]


class Picky(Numbers):
    def load_state_dict(self, state):
        raise KeyError("sampler")


def start(seed=0):
    parameters = make_parameters(seed)
    return parameters, tierstep.AdamW(parameters.items(), **OPTIONS, tiers=Tiers(gpu=0, ram=1 << 20))


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(tmp_path, kind):
    checkpoints = tierstep.Checkpoints(tmp_path)
    rates = {}
    for resumed in (False, True):
        parameters, optimizer = start()
        scheduler = SCHEDULERS[kind](optimizer)
        if resumed:
            checkpoints.restore(optimizer=optimizer, scheduler=scheduler)
        else:
            for step in range(STEPS):
                train(optimizer, parameters, step, step + 1)
                scheduler.step()
            checkpoints.save(STEPS, optimizer=optimizer, scheduler=scheduler, wait=True)
        rates[resumed] = [optimizer.param_groups[0]["lr"]]
        for step in range(STEPS, 3 * STEPS):
            train(optimizer, parameters, step, step + 1)
            scheduler.step()
            rates[resumed].append(optimizer.param_groups[0]["lr"])
        optimizer.close()
    assert rates[True] == rates[False]
    assert len(set(rates[False])) > 1 or kind == "ConstantLR"


def test_a_scheduler_that_follows_the_loss_goes_on_where_it_was(tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path)
    _, optimizer = start()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for loss in (3.0, 3.0):
        plateau.step(loss)
    checkpoints.save(2, optimizer=optimizer, scheduler=plateau, wait=True)
    _, optimizer = start()
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    checkpoints.restore(optimizer=optimizer, scheduler=plateau)
    plateau.step(3.0)
    assert optimizer.param_groups[0]["lr"] == OPTIONS["lr"] * 0.1


def test_scaler_data_and_extras_come_back_with_the_random_states(tmp_path):
    checkpoints = tierstep.Checkpoints(tmp_path)
    scaler, data = torch.amp.GradScaler("cpu", init_scale=8.0), Numbers()
    scaler.scale(torch.ones(1))  # it has its state from here on
    next(data), next(data)
    checkpoints.save(2, scaler=scaler, data=data, extra={"epoch": 3})
    expected = [next(data) for _ in range(3)], torch.rand(2)
    scaler, data = torch.amp.GradScaler("cpu"), Numbers(seed=1)
    assert checkpoints.restore(scaler=scaler, data=data) == {"epoch": 3}
    assert scaler.get_scale() == 8.0
    assert len(data.given) == 2
    assert [next(data) for _ in range(3)] == expected[0]
    assert torch.equal(torch.rand(2), expected[1])


def test_the_random_states_are_those_saved_although_a_part_draws_when_it_is_restored(tmp_path):
    class Drawing(Numbers):
        def load_state_dict(self, state):
            torch.rand(7)

    checkpoints = tierstep.Checkpoints(tmp_path)
    checkpoints.save(1, data=Numbers())
    expected = torch.rand(2)
    checkpoints.restore(data=Drawing())
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": [1, object()]}}, r"data\.a\.b\.1 is a object"),
        ({"a": b"bytes"}, r"data\.a is a bytes"),
        ({"f": lambda: 0}, r"data\.f is a function"),
        ({"t": torch.zeros(2, dtype=torch.complex64)}, r"data\.t is torch\.complex64"),
    ],
)
def test_a_state_that_cannot_be_stored_is_named_before_anything_is_written(tmp_path, monkeypatch, state, words):
    data = Numbers()
    monkeypatch.setattr(data, "state_dict", lambda: state)
    with pytest.raises(tierstep.ConfigError, match=words):
        tierstep.Checkpoints(tmp_path / "new").save(1, data=data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["save", "restore"])
def test_an_object_without_the_two_methods_is_refused(tmp_path, call):
    checkpoints = tierstep.Checkpoints(tmp_path)
    step = [1] if call == "save" else []
    with pytest.raises(tierstep.ConfigError, match=r"scheduler is a dict: give an object that has state_dict"):
        getattr(checkpoints, call)(*step, scheduler={})
    assert list(tmp_path.iterdir()) == []


def everything(optimizer, parameters, scheduler, scaler):
    found = {**outcome(optimizer, parameters), "rng": torch.get_rng_state().tolist()}
    found["scheduler"], found["scaler"] = copy.deepcopy(scheduler.state_dict()), scaler.state_dict()
    return found


@pytest.mark.parametrize("last", ["refuses", "missing"])
def test_nothing_is_changed_when_a_part_refuses_its_state_or_has_none(tmp_path, last):
    checkpoints = tierstep.Checkpoints(tmp_path)
    parameters, optimizer = start()
    scheduler, scaler = lr_scheduler.StepLR(optimizer, 2), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    data = {} if last == "missing" else {"data": Numbers()}
    checkpoints.save(0, optimizer=optimizer, scheduler=scheduler, scaler=scaler, **data)
    train(optimizer, parameters, 0, 1)
    scheduler.step(), scaler.update(4.0), torch.rand(1)
    before = everything(optimizer, parameters, scheduler, scaler)
    words = "the data cannot take over its state" if data else "holds no data: it was saved without one"
    with pytest.raises(tierstep.CheckpointMismatch, match=words):
        checkpoints.restore(optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=Picky())
    assert everything(optimizer, parameters, scheduler, scaler) == before
    checkpoints.restore(optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    assert scaler.get_scale() == 8.0


def test_a_checkpoint_without_the_key_is_one_of_an_earlier_version(tmp_path):
    import json

    from tierstep.engine.manifest import _checksum

    checkpoints = tierstep.Checkpoints(tmp_path)
    path = checkpoints.save(1, extra={"a": 1}).wait()
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["states"], manifest["checksum"]
    manifest["checksum"] = _checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoints.restore() == {"a": 1}
