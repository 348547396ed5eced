"""What every tier promises, whatever it is made of."""

import pytest
import torch

from tierstep.io.memory import MemoryBackend
from tierstep.io.threads import ThreadBackend
from tierstep.tiers.nvme import NvmeTier
from tierstep.tiers.resident import ResidentTier
from tierstep.tiers.slots import SlotPool

SIZES = {0: 64, 1: 4096, 2: 4160, 7: 100_032}


class TierContract:
    @pytest.fixture
    def tier(self):
        raise NotImplementedError

    @pytest.fixture
    def slots(self):
        return SlotPool(2, 102_400)

    def fill(self, slot, seed):
        slot.tensor.copy_(torch.randint(0, 256, slot.tensor.shape, dtype=torch.uint8, generator=generator(seed)))

    def test_what_is_stored_is_fetched(self, tier, slots):
        tier.reserve(SIZES)
        source, target = slots.acquire(), slots.acquire()
        for index in SIZES:
            self.fill(source, index)
            tier.store(index, source).wait()
        for index, nbytes in SIZES.items():
            self.fill(source, index)
            tier.fetch(index, target).wait()
            assert torch.equal(target.tensor[:nbytes], source.tensor[:nbytes])

    def test_records_reserved_later_do_not_disturb_earlier_ones(self, tier, slots):
        tier.reserve({0: 4096})
        source, target = slots.acquire(), slots.acquire()
        self.fill(source, 0)
        tier.store(0, source).wait()
        tier.reserve({1: 8192, 2: 64})
        tier.fetch(0, target).wait()
        assert torch.equal(target.tensor[:4096], source.tensor[:4096])

    def test_a_view_if_there_is_one_is_the_record_itself(self, tier, slots):
        tier.reserve(SIZES)
        slot = slots.acquire()
        self.fill(slot, 3)
        tier.store(2, slot).wait()
        view = tier.view(2)
        assert view is None or torch.equal(view, slot.tensor[: SIZES[2]])

    def test_a_link_keeps_the_bytes_that_a_later_store_replaces(self, tier, slots, tmp_path):
        tier.reserve({0: 4096})
        source, target = slots.acquire(), slots.acquire()
        self.fill(source, 0)
        tier.store(0, source).wait()
        linked = tier.link(0, tmp_path / "linked")
        before = bytes(source.memory[:4096])
        self.fill(source, 1)
        tier.store(0, source).wait()
        tier.fetch(0, target).wait()
        assert torch.equal(target.tensor[:4096], source.tensor[:4096])
        assert linked == (tmp_path / "linked").exists()
        if linked:
            assert (tmp_path / "linked").read_bytes() == before

    def test_an_adopted_file_is_the_record_and_is_never_written(self, tier, slots, tmp_path):
        tier.reserve({0: 4096})
        slot = slots.acquire()
        (tmp_path / "given").write_bytes(bytes(range(256)) * 16)
        if not tier.adopt(0, tmp_path / "given"):
            return
        tier.fetch(0, slot).wait()
        assert bytes(slot.memory[:4096]) == bytes(range(256)) * 16
        self.fill(slot, 1)
        tier.store(0, slot).wait()
        assert (tmp_path / "given").read_bytes() == bytes(range(256)) * 16

    def test_closing_twice_is_fine(self, tier):
        tier.reserve(SIZES)
        tier.close()
        tier.close()


class TestHost(TierContract):
    @pytest.fixture
    def tier(self):
        return ResidentTier("host")


class TestDeviceOnCpu(TierContract):
    @pytest.fixture
    def tier(self):
        return ResidentTier("device")


class TestNvmeInMemory(TierContract):
    @pytest.fixture
    def tier(self, tmp_path):
        return NvmeTier([tmp_path], MemoryBackend())


class TestNvmeOnFiles(TierContract):
    @pytest.fixture
    def tier(self, tmp_path):
        with ThreadBackend() as backend:
            yield NvmeTier([tmp_path], backend)

    def test_files_of_one_file_system_are_linked(self, tier, tmp_path):
        tier.reserve({0: 4096})
        assert tier.link(0, tmp_path / "linked")
        assert tier.adopt(0, tmp_path / "linked")

    def test_files_have_the_recorded_length_and_vanish_on_close(self, tier, tmp_path):
        tier.reserve(SIZES)
        lengths = {index: tier.path(index).stat().st_size for index in SIZES}
        assert lengths == {0: 4096, 1: 4096, 2: 8192, 7: 102_400}
        tier.close()
        assert list(tmp_path.iterdir()) == []


def generator(seed):
    return torch.Generator().manual_seed(seed)
