"""Copy-on-update: the bytes that records had at one moment, handed out while the engine goes on changing them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from tierstep.tiers.slots import Slot, SlotPool

BUFFERS = 3  # one being consumed, two that wait for a slower consumer


class Freeze:
    """Some records as they were when this was made. One thread consumes them; the store calls `preserve`.

    A record is copied once: by the consumer when its turn comes, or before that by whoever is about to change it.
    Thread A is about to update record 7, thread B (the consumer) is about to copy it: whoever is first marks it as
    being copied, and A goes on only when that copy is whole. A waits for B, too, while all buffers are full, so memory
    is bounded by `BUFFERS` records, and a drive that is too slow slows training instead of losing anything. The
    buffers are freed when everything is consumed.
    """

    def __init__(self, indices: Iterable[int], nbytes: int, copy: Callable[[int, Slot], object]) -> None:
        self._copy = copy
        self._pending = dict.fromkeys(indices)
        self._copying: set[int] = set()
        self._copied: deque[tuple[int, Slot]] = deque()
        count = min(BUFFERS, len(self._pending))
        pool = SlotPool(count, nbytes if count else 0)
        self._buffers = [pool.acquire() for _ in range(count)]
        self._changed = threading.Condition()

    def preserve(self, index: int) -> None:
        """Copy a record now if it is still wanted, because it is about to change. Blocks while the buffers are full."""
        if index not in self._pending:  # it stays in there until its copy is whole
            return
        with self._changed:
            self._changed.wait_for(lambda: index not in self._pending or self._can_copy(index))
            if index not in self._pending:
                return
            buffer = self._begin(index)
        self._copy_into(buffer, index)
        with self._changed:
            self._copied.append((index, buffer))
            self._end(index)

    def preserve_all(self) -> None:
        """Copy everything that is still wanted, because it is about to vanish. Blocks until the consumer has it."""
        for index in list(self._pending):
            self.preserve(index)

    def records(self) -> Iterator[tuple[int, Slot]]:
        """Yield (record, buffer); a buffer is the consumer's until it asks for the next one.

        The copies that wait come first.
        """
        while (found := self._next()) is not None:
            try:
                yield found
            finally:
                self._give_back(found[1])
        self.close()

    def close(self) -> None:
        """Give up what was not consumed: nobody waits for this any more. Frees the memory."""
        with self._changed:
            self._pending.clear()
            self._copied.clear()
            self._buffers.clear()
            self._changed.notify_all()

    def _next(self) -> tuple[int, Slot] | None:
        """Return a copy that waits, or make one."""
        with self._changed:
            self._changed.wait_for(lambda: self._copied or not self._pending or self._first() is not None)
            if self._copied:
                return self._copied.popleft()
            index = self._first()
            if index is None:
                return None
            buffer = self._begin(index)
        self._copy_into(buffer, index)
        with self._changed:
            self._end(index)
        return index, buffer

    def _first(self) -> int | None:
        return next((index for index in self._pending if self._can_copy(index)), None)

    def _can_copy(self, index: int) -> bool:
        return bool(self._buffers) and index not in self._copying

    def _begin(self, index: int) -> Slot:
        self._copying.add(index)
        return self._buffers.pop()

    def _copy_into(self, buffer: Slot, index: int) -> None:
        """Copy, with the lock free: others may copy other records meanwhile."""
        try:
            self._copy(index, buffer)
        except BaseException:
            with self._changed:
                self._end(index)
            self._give_back(buffer)
            raise

    def _end(self, index: int) -> None:
        self._copying.discard(index)
        self._pending.pop(index, None)
        self._changed.notify_all()

    def _give_back(self, buffer: Slot) -> None:
        with self._changed:
            self._buffers.append(buffer)
            self._changed.notify_all()
