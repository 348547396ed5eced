"""overlap = "forward": the step goes on behind the next forward pass, never stale, to the same bits."""

import errno
import threading

import pytest
import torch
from fake_accelerator import FakeAccelerator
from torch.utils.checkpoint import checkpoint

import tierstep
from tierstep import Tiers
from tierstep.engine.overlap import WeightGates
from tierstep.errors import ConfigError, TransferError
from tierstep.io.faults import Fail
from tierstep.io.memory import MemoryBackend

from training_runs import bits

of_compiled_code = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces

OPTIONS = dict(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


class Net(torch.nn.Module):
    """Tied weights, a frozen one, and a parameter of the root itself."""

    def __init__(self, *, recompute=False):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(16))
        self.embed = torch.nn.Embedding(40, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.head = torch.nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].bias.requires_grad_(False)
        self.recompute = recompute

    def forward(self, tokens):
        values = self.embed(tokens) * self.scale
        for layer in self.layers:
            values = checkpoint(layer, values, use_reentrant=False) if self.recompute else layer(values)
            values = torch.relu(values)
        return self.head(values)


def make_net(**options):
    torch.manual_seed(3)
    return Net(**options).bfloat16()


def train(model, optimizer, steps=5, *, first=0, accumulation=1, clip=True, clear=True, before=lambda: None):
    losses = []
    for step in range(first, steps):
        for micro_step in range(accumulation):
            before()
            generator = torch.Generator().manual_seed(10 * step + micro_step)
            tokens = torch.randint(0, 40, (2, 8), generator=generator)
            loss = torch.nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        if clear:
            optimizer.zero_grad()
    return losses


def outcome(model, optimizer):
    optimizer.synchronize()
    state = {name: optimizer.state[p] for name, p in model.named_parameters() if p.requires_grad}
    return [(bits(p), {k: bits(v) for k, v in state.get(name, {}).items()}) for name, p in model.named_parameters()]


def run(tiers, *, wrap=lambda model: model, settle=None, recompute=False, **options):
    model = make_net(recompute=recompute)
    wrapped = wrap(model)
    with tierstep.AdamW(model.named_parameters(), **OPTIONS, tiers=tiers) as optimizer:
        if tiers.overlap == "forward":
            optimizer.attach(wrapped)
        if settle is not None:
            for module in model.modules():
                module.register_forward_pre_hook(lambda *_: settle())
        losses = train(wrapped, optimizer, **options)
        found = outcome(model, optimizer)
        if settle is not None:
            settle()
            found = outcome(model, optimizer)
    return losses, found


def tiers_for(kind, folder, overlap):
    ram, nvme = {"host": (None, ()), "nvme": ("64KiB", [folder]), "mixed": ("24KiB", [folder])}[kind]
    slots = 2 if nvme else None
    return Tiers(gpu=0, ram=ram if kind != "nvme" else 8192, nvme=nvme, subgroup=1280, slots=slots, overlap=overlap)


@pytest.mark.parametrize("kind", ["host", "nvme", "mixed"])
@pytest.mark.parametrize(
    "options",
    [{}, dict(accumulation=3), dict(clip=False), dict(recompute=True), dict(clear=False)],
    ids=["plain", "accumulation", "no clipping", "checkpointing", "gradients kept"],
)
def test_losses_and_state_are_those_without_overlap(kind, options, tmp_path):
    expected = run(tiers_for(kind, tmp_path, "none"), **options)
    assert run(tiers_for(kind, tmp_path, "forward"), **options) == expected


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("schedule", ["greedy", "cpu", "gpu"])
def test_no_order_of_late_work_on_a_device_is_seen_by_a_forward_pass(seed, schedule, monkeypatch):
    expected = run(Tiers())
    fake = FakeAccelerator(seed)
    monkeypatch.setattr("tierstep.engine.optimizer.accelerator_of", lambda device: fake)
    tiers = Tiers(subgroup=1280, overlap="forward", schedule=schedule)
    assert run(tiers, settle=fake.settle_caller) == expected


@of_compiled_code
def test_a_compiled_model_waits_for_all_of_its_weights(tmp_path):
    expected = run(tiers_for("nvme", tmp_path, "none"))
    compiled = run(tiers_for("nvme", tmp_path, "forward"), wrap=lambda m: torch.compile(m, backend="eager"))
    assert compiled == expected


@of_compiled_code
def test_compiled_layers_wait_for_theirs(tmp_path):
    def compile_layers(model):
        for layer in model.layers:
            layer.compile(backend="eager")
        return model

    expected = run(tiers_for("nvme", tmp_path, "none"))
    assert run(tiers_for("nvme", tmp_path, "forward"), wrap=compile_layers) == expected


def test_without_attach_the_first_step_is_refused_before_anything_changes():
    model = make_net()
    with tierstep.AdamW(model.named_parameters(), tiers=Tiers(overlap="forward")) as optimizer:
        optimizer.attach(model.layers)
        with pytest.raises(ConfigError, match=r"scale, embed\.weight: call optimizer\.attach"):
            train(model, optimizer, 1)
        assert not optimizer.state


@pytest.fixture
def faulty(monkeypatch, tmp_path):
    """A backend that fails when told to, settings that use it, and what four steps without a fault lead to."""
    expected = run(tiers_for("nvme", tmp_path, "none"), steps=4)[1]
    backend = MemoryBackend()
    monkeypatch.setattr("tierstep.tiers.build.open_backend", lambda *_, **__: backend)
    return backend, tiers_for("nvme", tmp_path, "forward"), expected


def test_what_goes_wrong_in_the_background_is_raised_by_the_next_forward_and_can_be_finished(faulty):
    backend, tiers, expected = faulty
    model = make_net()
    with tierstep.AdamW(model.named_parameters(), **OPTIONS, tiers=tiers) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, 2)
        optimizer.synchronize()
        backend.inject(Fail(errno.EIO), at=len(backend.log) + 2)
        train(model, optimizer, 3, first=2)
        with pytest.raises(TransferError):
            train(model, optimizer, 4, first=3)
        optimizer.synchronize()
        train(model, optimizer, 4, first=3)
        assert outcome(model, optimizer) == expected


def test_an_error_in_the_background_is_not_lost_by_closing(faulty):
    backend, tiers, _ = faulty
    model = make_net()
    optimizer = tierstep.AdamW(model.named_parameters(), **OPTIONS, tiers=tiers)
    optimizer.attach(model)
    train(model, optimizer, 1)
    optimizer.synchronize()
    backend.inject(Fail(errno.EIO), at=len(backend.log) + 1)
    train(model, optimizer, 2, first=1)
    with pytest.raises(TransferError):
        optimizer.close()


def test_the_state_is_read_when_the_step_is_over(faulty):
    _, tiers, expected = faulty
    model = make_net()
    with tierstep.AdamW(model.named_parameters(), **OPTIONS, tiers=tiers) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, 4)
        state = optimizer.state_dict()["state"]
        assert {int(entry["step"]) for entry in state.values()} == {4}
        assert bits(state[1]["exp_avg"]) == expected[1][1]["exp_avg"]


def test_gates_let_pass_who_wants_other_weights_and_wake_who_wants_these():
    gates = WeightGates(None)
    gates.close([1, 2])
    assert gates.wait([0, 3])
    passed = []
    waiting = threading.Thread(target=lambda: passed.append(gates.wait([0, 1])))
    waiting.start()
    gates.publish(2, None)
    assert not passed
    gates.publish(1, None)
    waiting.join(timeout=20)
    assert passed == [True]


def test_gates_of_a_failed_step_let_everybody_ask_why():
    gates = WeightGates(None)
    gates.close([1])
    gates.fail()
    assert not gates.wait([1])
