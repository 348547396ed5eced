"""Who is where: the one place that knows and changes where the newest bytes of every record are.

A record goes through these states, and only methods of `Store` change them:

    FRESH ──fetch──┐                            (all zero; nothing was ever written, so nothing is read)
    HOME ──fetch──>FETCHING──take──>HELD──put_back(changed=False)──> where it was before
      ^                               ├──put_back(keep=False)──> STORING ──ok──> HOME
      │                               └──put_back(keep=True)───> RESIDENT <─failed─┘
      └────────── STORING <──write_back── RESIDENT ──fetch──> FETCHING (already there)

Records of memory tiers are worked on in place: they know only FRESH, HOME and HELD. A cold record that is RESIDENT
is newest in its slot, and its file is older. A store that fails leaves it RESIDENT, so nothing is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from tierstep.configs.schema import Verify
from tierstep.errors import TransferError
from tierstep.io.requests import Completion
from tierstep.tiers.freeze import Freeze
from tierstep.tiers.record import RecordLayout, checksum_of
from tierstep.tiers.slots import Slot, SlotPool
from tierstep.tiers.tier import COMPLETED, Tier


class State(Enum):
    """Where the newest bytes of a record are, or who has them."""

    FRESH = "fresh"
    HOME = "home"
    FETCHING = "fetching"
    HELD = "held"
    STORING = "storing"
    RESIDENT = "resident"


@dataclass
class _Entry:
    layout: RecordLayout
    home: str
    state: State = State.FRESH
    before: State = State.FRESH  # the state that put_back(changed=False) goes back to
    slot: Slot | None = None
    fetching: Completion | None = None
    arrived: bool = False  # whether the slot has the newest bytes, or is still being filled
    checksum: str | None = None  # of the record's bytes in its file
    adopted: bool = False  # whether its file is another one's that was never read here
    in_place: dict[str, torch.Tensor] | None = None  # the fields of a record that is worked on where it lives


PATIENCE_S = 0.25  # how often someone who waits for a slot looks whether a transfer has timed out

OnTransfer = Callable[[str, int, float, float, int], None]  # lane, record, start, end (perf_counter), bytes


class Store:
    """All records of one optimizer. Its lock is never held during I/O or while waiting for a slot.

    Any thread may call; of one record only one thread at a time, besides one reader: the consumer of a freeze.
    Records read from files are compared with their checksums as `verify` says (see `configs.schema.Tiers`); errors
    name a record as `describe` does.
    """

    def __init__(
        self, tiers: Mapping[str, Tier], slots: SlotPool, on_transfer: OnTransfer, verify: Verify = "always"
    ) -> None:
        self.describe: Callable[[int], str] = "record {}".format
        self._verify = verify
        self._tiers = tiers
        self._slots = slots
        self._on_transfer = on_transfer
        self._entries: list[_Entry] = []
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._failures: list[BaseException] = []
        self._stores: dict[int, Completion] = {}
        self._under_way: dict[Completion, float] = {}  # every transfer, and when it began
        self._frozen = Freeze((), 0, self.read)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, layouts: Sequence[RecordLayout], homes: Sequence[str]) -> None:
        """Append records, all fresh (all zero). Raises before anything is kept when a tier has no room."""
        first = len(self._entries)
        files_first = sorted(self._tiers.items(), key=lambda item: item[0] != "nvme")  # what may fail for want of space
        for name, tier in files_first:
            tier.reserve({first + i: layouts[i].nbytes for i, home in enumerate(homes) if home == name})
        self._entries += [_Entry(layout, home) for layout, home in zip(layouts, homes, strict=True)]

    def replace_slots(self, slots: SlotPool) -> None:
        """Use other slots from now on; the old ones are written back first. Not during a step."""
        self.write_back(self.resident())
        self.settle()
        self._slots.close()
        self._slots = slots

    @property
    def slots(self) -> SlotPool:
        """The staging slots of the cold records."""
        return self._slots

    def home(self, index: int) -> str:
        """Return the tier that a record belongs to."""
        return self._entries[index].home

    def homes(self) -> tuple[str, ...]:
        """Return the tier of every record."""
        return tuple(entry.home for entry in self._entries)

    def is_fresh(self, index: int) -> bool:
        """Say whether a record was never changed: it is all zero, and nothing of it is in any file."""
        return self._entries[index].state is State.FRESH

    def layout(self, index: int) -> RecordLayout:
        """Return the layout of a record."""
        return self._entries[index].layout

    def resident(self) -> tuple[int, ...]:
        """Return the cold records whose newest bytes are in a slot, and older ones in their files."""
        with self._lock:
            return tuple(i for i, entry in enumerate(self._entries) if entry.state is State.RESIDENT)

    def fetch(self, index: int) -> Completion:
        """Start bringing a record to where it can be worked on; blocks only while all slots are taken.

        A record of a memory tier, a fresh one and one that is still in its slot are there at once.
        """
        entry = self._entries[index]
        self._await_store(index)
        with self._lock:
            entry.before, entry.state, entry.fetching = entry.state, State.FETCHING, None
            entry.arrived = entry.slot is not None
        if entry.slot is not None or self._tiers[entry.home].view(index) is not None:
            return COMPLETED
        try:
            entry.slot = self._acquire_slot()
            entry.fetching = self._start_read(index, entry, entry.slot)
        except BaseException:
            self._forget_fetch(entry)
            raise
        return entry.fetching

    def take(self, index: int) -> dict[str, torch.Tensor]:
        """Return the fields of a fetched record, to be changed in place until `put_back`.

        Raises `TransferError` when what was read from a file is not what was written to it.
        """
        entry = self._entries[index]
        if entry.slot is not None and entry.before is State.HOME:
            self._check(index, entry.slot)
            entry.adopted = False
        entry.arrived = True
        self._frozen.preserve(index)
        with self._lock:
            entry.state = State.HELD
        if entry.slot is not None:
            return entry.layout.views(entry.slot.tensor)
        if entry.in_place is None:
            entry.in_place = entry.layout.views(self._in_place(index))
        return entry.in_place

    def put_back(self, index: int, *, changed: bool, keep: bool = False) -> None:
        """End the work on a fetched record. Does not wait for the transfer that this starts.

        A changed cold record is written to its file, or with `keep` stays in its slot; an unchanged one goes back to
        the state that it was fetched from.
        """
        entry = self._entries[index]
        if entry.slot is None:
            with self._lock:
                entry.state = State.HOME if changed else entry.before
        elif changed and not keep:
            self._start_write(index, entry, entry.slot)
        elif changed or entry.before is State.RESIDENT:
            with self._lock:
                entry.state = State.RESIDENT
        else:
            self._forget_fetch(entry)

    def write_back(self, indices: Iterable[int]) -> None:
        """Start writing records that are in slots to their files; `settle` says how it went."""
        for index in indices:
            entry = self._entries[index]
            if entry.slot is not None and entry.state is State.RESIDENT:
                self._start_write(index, entry, entry.slot)

    def settle(self) -> None:
        """Wait until no store is under way; raise the first failure since the last call.

        Raises `TransferTimeout` when a store never completes. The records of failed stores are kept in their slots.
        """
        for index in list(self._stores):
            self._await_store(index)
        with self._lock:
            failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def read(self, index: int, target: Slot) -> dict[str, torch.Tensor]:
        """Copy the newest bytes of a record into `target` and return its fields there. Blocks.

        Not during a step, except from a `Freeze`, which sees to it that nobody changes the record meanwhile.
        """
        entry = self._entries[index]
        with self._lock:  # thread A (a step) may be fetching the record while thread B (a save) copies it
            slot = entry.slot if entry.arrived else None
            fresh = State.FRESH in (entry.state, entry.before if entry.state is State.FETCHING else entry.state)
        if fresh:
            target.tensor[: entry.layout.padded_nbytes].zero_()
        elif slot is not None:
            nbytes = entry.layout.padded_nbytes
            target.tensor[:nbytes].copy_(slot.tensor[:nbytes])
        else:
            self._timed("read", index, self._tiers[entry.home].fetch(index, target)).wait()
            self._check(index, target)
        return entry.layout.views(target.tensor)

    def write(self, index: int, source: Slot) -> None:
        """Replace a record by the bytes in `source`. Blocks; not during a step."""
        entry = self._entries[index]
        self._await_store(index)
        self._frozen.preserve(index)
        checksum = self._checksum(index, source)
        self._timed("write", index, self._tiers[entry.home].store(index, source)).wait()
        self._settle_at_home(entry, checksum)

    def link(self, index: int, target: Path) -> str | None:
        """Give the newest bytes of a cold record a second name, and return their checksum. Not during a step.

        Returns None, and makes no name, where the newest bytes are not in a file or the file cannot be linked there.
        """
        entry = self._entries[index]
        if entry.state is not State.HOME or entry.checksum is None or entry.slot is not None:
            return None
        return entry.checksum if self._tiers[entry.home].link(index, target) else None

    def adopt(self, index: int, source: Path, checksum: str) -> bool:
        """Replace a cold record by the file `source` without copying it; it is checked when it is first read.

        Returns False, and changes nothing, where the record is not cold or the file cannot be linked.
        """
        entry = self._entries[index]
        self._await_store(index)
        self._frozen.preserve(index)
        if not self._tiers[entry.home].adopt(index, source):
            return False
        self._settle_at_home(entry, checksum)
        entry.adopted = True
        return True

    def reset(self, index: int) -> None:
        """Make a record fresh again: all zero, without writing anything to a file. Not during a step."""
        entry = self._entries[index]
        if entry.state is State.FRESH:
            return
        self._await_store(index)
        self._frozen.preserve(index)
        in_place = self._tiers[entry.home].view(index)
        if in_place is not None:
            in_place.zero_()
        self._settle_at_home(entry, None)
        entry.state = State.FRESH

    def freeze(self, indices: Sequence[int]) -> Freeze:
        """Promise the present bytes of records to one consumer, whatever is done to them from now on.

        Waits until the consumer of an earlier freeze has all of its records. Not during a step.
        """
        self._frozen.preserve_all()
        nbytes = max((self._entries[index].layout.padded_nbytes for index in indices), default=0)
        self._frozen = Freeze(indices, nbytes, self.read)
        return self._frozen

    def close(self) -> None:
        """Wait for transfers, and for a freeze's consumer to have its records; then give up all records."""
        self._frozen.preserve_all()
        for index in list(self._stores):
            self._await_store(index)
        for tier in self._tiers.values():
            tier.close()
        self._slots.close()
        self._entries.clear()

    # ---- the only places where slots change hands

    def _acquire_slot(self) -> Slot:
        """Take a slot; while all are taken, see to it that a drive that has stopped answering is an error."""
        while (slot := self._slots.acquire_within(PATIENCE_S)) is None:
            now = time.perf_counter()
            for completion, start in list(self._under_way.items()):
                if now - start > completion.timeout_s:
                    raise completion.timeout()
        return slot

    def _start_read(self, index: int, entry: _Entry, slot: Slot) -> Completion:
        if entry.before is State.FRESH:
            slot.tensor[: entry.layout.padded_nbytes].zero_()
            return COMPLETED
        return self._timed("read", index, self._tiers[entry.home].fetch(index, slot))

    def _forget_fetch(self, entry: _Entry) -> None:
        with self._lock:
            slot, entry.slot, entry.state, entry.arrived = entry.slot, None, entry.before, False
        if slot is None:
            return
        if entry.fetching is None:
            self._slots.release(slot)
        else:  # a read that timed out still owns its slot; the slot is free when the read has really ended
            release = self._slots.release  # of the pool that the slot is from, whichever is in use then
            entry.fetching.add_done_callback(lambda _: release(slot))

    def _start_write(self, index: int, entry: _Entry, slot: Slot) -> None:
        self._frozen.preserve(index)
        checksum = self._checksum(index, slot)
        with self._lock:
            entry.state = State.STORING
        try:
            completion = self._timed("write", index, self._tiers[entry.home].store(index, slot))
        except BaseException:
            with self._lock:
                entry.state = State.RESIDENT
            raise
        with self._lock:
            self._stores[index] = completion
        completion.add_done_callback(lambda done: self._end_write(index, done, checksum))

    def _end_write(self, index: int, completion: Completion, checksum: str | None) -> None:
        entry = self._entries[index]
        freed = None
        with self._lock:
            if completion.error is None:
                freed, entry.slot, entry.state, entry.checksum = entry.slot, None, State.HOME, checksum
                entry.arrived = False
            else:
                entry.state = State.RESIDENT
                self._failures.append(completion.error)
                self._slots.interrupt(interrupted=True)  # this slot stays taken: nobody may wait for it for ever
            self._stores.pop(index, None)
            self._settled.notify_all()
        if freed is not None:
            self._slots.release(freed)

    def _await_store(self, index: int) -> None:
        """Wait until no store of this record is under way; raise only when it never ends."""
        completion = self._stores.get(index)
        if completion is None:
            return
        with self._settled:
            ended = self._settled.wait_for(lambda: index not in self._stores, timeout=completion.timeout_s)
        if not ended:
            completion.wait()

    def _settle_at_home(self, entry: _Entry, checksum: str | None) -> None:
        with self._lock:
            slot, entry.slot, entry.state, entry.checksum = entry.slot, None, State.HOME, checksum
            entry.arrived = entry.adopted = False
        if slot is not None:
            self._slots.release(slot)

    def _checksum(self, index: int, slot: Slot) -> str | None:
        """Return the checksum of a record as its file has it; None for one that lives in memory."""
        entry = self._entries[index]
        if self._tiers[entry.home].view(index) is not None:
            return None
        return checksum_of(slot.memory[: entry.layout.padded_nbytes])

    def _check(self, index: int, slot: Slot) -> None:
        entry = self._entries[index]
        wanted = self._verify == "always" or (self._verify == "restore" and entry.adopted)
        if wanted and entry.checksum is not None and self._checksum(index, slot) != entry.checksum:
            raise TransferError(
                f"{self.describe(index)} was read from its slot file with other bytes than were written: the drive "
                f"or the file is damaged; restore a checkpoint"
            )

    def _in_place(self, index: int) -> torch.Tensor:
        record = self._tiers[self._entries[index].home].view(index)
        if record is None:
            raise ValueError(f"record {index} was not fetched")
        return record

    def _timed(self, lane: str, index: int, completion: Completion) -> Completion:
        start, entry = time.perf_counter(), self._entries[index]
        nbytes = entry.layout.padded_nbytes
        if self._tiers[entry.home].view(index) is not None:
            return completion

        def ended(done: Completion) -> None:
            self._under_way.pop(done, None)
            self._on_transfer(lane, index, start, time.perf_counter(), nbytes)

        self._under_way[completion] = start
        completion.add_done_callback(ended)
        return completion
