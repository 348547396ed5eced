"""The cold tier: one preallocated slot file a record, moved through an I/O backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from tierstep.errors import DiskFull, TierstepError
from tierstep.io.alignment import ALIGNMENT_BYTES, align_up
from tierstep.io.backend import IoBackend
from tierstep.io.requests import Completion, Read, Write
from tierstep.tiers.slots import Slot
from tierstep.tiers.striping import Striping


class NvmeTier:
    """Records in files, spread over `directories` in proportion to their `rates` (equal ones without).

    A directory that is full is passed over while another one has room. Every file is allocated when its record is
    reserved, so that full drives are known before the first step, and is overwritten in place afterwards; except when
    somebody else, such as a checkpoint, has linked it: then that file stays as it is, and the next store goes into a
    new one. The backend is the caller's; `close` removes the files.
    """

    name = "nvme"

    def __init__(self, directories: Sequence[Path], backend: IoBackend, rates: Sequence[float] = ()) -> None:
        self._directories = tuple(directories)
        self._striping = Striping(rates or [1.0] * len(self._directories))
        self._backend = backend
        self._files: dict[int, tuple[Path, int]] = {}
        self._generations = count(1)

    def reserve(self, sizes: Mapping[int, int]) -> None:
        """See `Tier.reserve`. Raises `DiskFull`; the files of this call are removed again then."""
        made: dict[int, tuple[Path, int]] = {}
        try:
            for index, nbytes in sizes.items():
                padded = align_up(nbytes, ALIGNMENT_BYTES)
                made[index] = (self._allocate(f"record-{index:06d}.slot", padded), padded)
        except TierstepError:
            for path, _ in made.values():
                self._backend.remove(path)
            raise
        self._files.update(made)

    def path(self, index: int) -> Path:
        """Return the slot file of a record."""
        return self._files[index][0]

    def view(self, index: int) -> None:
        """See `Tier.view`: a file cannot be worked on in place."""

    def fetch(self, index: int, slot: Slot) -> Completion:
        """See `Tier.fetch`."""
        path, nbytes = self._files[index]
        return self._backend.submit(Read(path, 0, slot.memory[:nbytes]))

    def store(self, index: int, slot: Slot) -> Completion:
        """See `Tier.store`."""
        path, nbytes = self._files[index]
        if self._backend.link_count(path) > 1:
            path = self._next_path(index)
            self._backend.allocate(path, nbytes)
            self._use(index, path)
        return self._backend.submit(Write(path, 0, slot.memory[:nbytes]))

    def link(self, index: int, target: Path) -> bool:
        """See `Tier.link`."""
        return self._backend.link(self._files[index][0], target)

    def adopt(self, index: int, source: Path) -> bool:
        """See `Tier.adopt`."""
        path = self._next_path(index)
        if not self._backend.link(source, path):
            return False
        self._use(index, path)
        return True

    def close(self) -> None:
        """See `Tier.close`."""
        while self._files:
            _, (path, _) = self._files.popitem()
            self._backend.remove(path)

    def _allocate(self, name: str, nbytes: int) -> Path:
        """Make a file in the directory whose turn it is, or in the next one that has room."""
        first_full: DiskFull | None = None
        for place in self._striping.order():
            path = self._directories[place] / name
            try:
                self._backend.allocate(path, nbytes)
            except DiskFull as error:
                first_full = first_full or error
                continue
            self._striping.took(place)
            return path
        if first_full is None:
            raise ValueError("there is no directory")
        raise first_full

    def _next_path(self, index: int) -> Path:
        return self._files[index][0].with_name(f"record-{index:06d}.{next(self._generations)}.slot")

    def _use(self, index: int, path: Path) -> None:
        """Replace a record's slot file; the former one keeps whatever other names it has."""
        former, nbytes = self._files[index]
        self._files[index] = (path, nbytes)
        self._backend.remove(former)
