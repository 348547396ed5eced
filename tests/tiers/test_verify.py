"""`verify`: when bytes that come back from a file are compared with those that went there."""

from pathlib import Path

import pytest
import torch

import tierstep
from tierstep.io.memory import MemoryBackend
from tierstep.tiers.nvme import NvmeTier
from tierstep.tiers.record import RecordLayout
from tierstep.tiers.slots import SlotPool
from tierstep.tiers.store import Store

from training_runs import OPTIONS, make_parameters, outcome, run, set_gradients, train

LAYOUT = RecordLayout(100, (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)))
SAVED = Path("/in/memory/saved")
MODES = ("always", "restore", "off")


class World:
    """A store with one record in a file, and the file's bytes to tamper with."""

    def __init__(self, verify):
        self.backend = MemoryBackend()
        self.tier = NvmeTier([Path("/in/memory")], self.backend)
        self.store = Store({"nvme": self.tier}, SlotPool(1, LAYOUT.padded_nbytes), lambda *_: None, verify)
        self.store.add([LAYOUT], ["nvme"])

    @property
    def file(self):
        return self.backend.files[self.tier.path(0)]

    def change(self, value):
        self.store.fetch(0).wait()
        self.store.take(0)["exp_avg"].fill_(value)
        self.store.put_back(0, changed=True)
        self.store.settle()

    def take(self):
        self.store.fetch(0).wait()
        try:
            return self.store.take(0)["exp_avg"][0].item()
        finally:
            self.store.put_back(0, changed=False)


@pytest.mark.parametrize("verify", MODES)
def test_a_flipped_bit_is_an_error_only_where_every_read_is_compared(verify):
    world = World(verify)
    world.change(1.0)
    world.file[3] ^= 0x40
    if verify == "always":
        with pytest.raises(tierstep.TransferError, match="record 0 was read from its slot file with other bytes"):
            world.take()
    else:
        assert world.take() != 1.0


@pytest.mark.parametrize("verify", MODES)
def test_a_write_that_never_happened_is_noticed_where_every_read_is_compared(verify):
    world = World(verify)
    world.change(1.0)
    before = bytes(world.file)
    world.change(2.0)
    world.file[:] = before
    if verify == "always":
        with pytest.raises(tierstep.TransferError, match="other bytes than were written"):
            world.take()
    else:
        assert world.take() == 1.0


@pytest.mark.parametrize(("verify", "noticed"), [("always", True), ("restore", True), ("off", False)])
def test_a_checkpoints_file_is_compared_at_its_first_read_also_with_restore(verify, noticed):
    world = World(verify)
    world.change(1.0)
    checksum = world.store.link(0, SAVED)
    assert world.store.adopt(0, SAVED, checksum)
    world.file[3] ^= 0x40
    if noticed:
        with pytest.raises(tierstep.TransferError, match="other bytes"):
            world.take()
    else:
        world.take()


def test_with_restore_a_file_is_compared_once():
    world = World("restore")
    world.change(1.0)
    assert world.store.adopt(0, SAVED, world.store.link(0, SAVED))
    assert world.take() == 1.0
    world.file[3] ^= 0x40
    assert world.take() != 1.0


def cold(path, verify):
    return tierstep.Tiers(gpu=0, ram=8 << 10, nvme=[path], subgroup=2000, verify=verify)


@pytest.mark.parametrize("verify", MODES)
def test_no_mode_changes_a_bit(tmp_path, verify):
    assert run(cold(tmp_path, verify), steps=6) == run(tierstep.Tiers(gpu=0, ram=1 << 20), steps=6)


def test_a_write_that_never_happened_names_the_parameters(tmp_path):
    parameters = make_parameters()
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=cold(tmp_path, "always")) as optimizer:
        train(optimizer, parameters, 0, 2)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.slot")}
        train(optimizer, parameters, 2, 4)
        for path, content in before.items():
            path.write_bytes(content)
        set_gradients(parameters, 4)
        with pytest.raises(tierstep.TransferError, match=r"the state of (embed|norm|half|head)\.\w+.* \(record \d+\)"):
            optimizer.step()


@pytest.mark.parametrize("verify", MODES)
def test_a_damaged_checkpoint_is_refused_at_restore_unless_nothing_is_compared(tmp_path, verify):
    (tmp_path / "nvme").mkdir()
    checkpoints = tierstep.Checkpoints(tmp_path / "checkpoints")
    parameters = make_parameters()
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=cold(tmp_path / "nvme", "always")) as optimizer:
        train(optimizer, parameters, 0, 3)
        path = checkpoints.save(3, optimizer=optimizer, wait=True).wait()
        saved = outcome(optimizer, parameters)
    tiers = cold(tmp_path / "nvme", verify)
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers) as optimizer:
        checkpoints.restore(optimizer=optimizer)
        assert outcome(optimizer, parameters) == saved
    victim = sorted((path / "records").iterdir())[0]
    content = bytearray(victim.read_bytes())
    content[0] ^= 1
    victim.write_bytes(content)
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=tiers) as optimizer:
        if verify == "off":
            checkpoints.restore(optimizer=optimizer)
            assert outcome(optimizer, parameters) != saved
            victim.write_bytes(content[:-1])
        with pytest.raises(tierstep.CheckpointCorrupt, match=victim.name):
            checkpoints.restore(optimizer=optimizer)
