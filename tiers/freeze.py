"""Copy-on-update: the bytes that records had at one moment, handed out while the engine goes on changing them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tierstep.tiers.slots import Slot, SlotPool

COPIES = 2  # records that may wait, copied, for a slower consumer


class Freeze:
    """Some records as they were when this was made. One thread consumes them; the store calls `preserve`.

    A record is copied once: by the consumer when its turn comes, or before that by whoever is about to change it.
    Thread A is about to update record 7, thread B (the consumer) is about to copy it: both go through the lock, the
    first one copies, and A goes on only when that copy is whole. A waits for B only while all buffers are full, so
    memory is bounded by `COPIES` + 1 records, and a drive that is too slow slows training instead of losing anything.
    """

    def __init__(self, indices: Iterable[int], nbytes: int, copy: Callable[[int, Slot], object]) -> None:
        self._copy = copy
        self._pending = dict.fromkeys(indices)
        self._copied: deque[tuple[int, Slot]] = deque()
        pool = SlotPool(COPIES + 1, nbytes) if self._pending else None
        self._buffers = [pool.acquire() for _ in range(COPIES + 1)] if pool is not None else []
        self._own = self._buffers.pop() if self._buffers else None
        self._changed = threading.Condition()

    def preserve(self, index: int) -> None:
        """Copy a record now if it is still wanted, because it is about to change. Blocks while the buffers are full."""
        with self._changed:
            self._changed.wait_for(lambda: index not in self._pending or self._buffers)
            if index in self._pending:
                buffer = self._buffers.pop()
                self._copy(index, buffer)
                del self._pending[index]
                self._copied.append((index, buffer))

    def preserve_all(self) -> None:
        """Copy everything that is still wanted, because it is about to vanish. Blocks until the consumer has it."""
        for index in list(self._pending):
            self.preserve(index)

    def records(self) -> Iterator[tuple[int, Slot]]:
        """Yield (record, buffer); a buffer is the consumer's until it asks for the next one.

        The copies that wait come first.
        """
        while (found := self._next()) is not None:
            with self._lent(found):
                yield found

    def close(self) -> None:
        """Give up what was not consumed: nobody waits for this any more."""
        with self._changed:
            self._pending.clear()
            self._changed.notify_all()

    def _next(self) -> tuple[int, Slot] | None:
        with self._changed:
            if self._copied:
                return self._copied.popleft()
            if not self._pending or self._own is None:
                return None
            index = next(iter(self._pending))
            self._copy(index, self._own)
            del self._pending[index]
            return index, self._own

    @contextmanager
    def _lent(self, found: tuple[int, Slot]) -> Iterator[None]:
        try:
            yield
        finally:
            with self._changed:
                if found[1] is not self._own:
                    self._buffers.append(found[1])
                self._changed.notify_all()
