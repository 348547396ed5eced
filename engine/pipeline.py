"""Walks a plan over the lanes. This is the only place of a step with side effects.

    read lane    fetches cold records in the plan's order, as slots become free
    gpu lane     updates what is ready, taking warm records from the front end
    cpu lane     the same, taking warm records from the back end, until the two meet (or, bound by the plan, its own)
    write lane   the I/O backend's own threads: each stored record gives its slot back

A cold record that is ready goes first, whichever lane is free, because it occupies a slot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tierstep.engine.plan import StepPlan
from tierstep.engine.trace import Trace
from tierstep.errors import StepInterrupted
from tierstep.io.requests import Completion
from tierstep.tiers.store import Store


class Processor(Protocol):
    """Something that can update subgroups: a lane's worker. Only that lane's thread calls it."""

    @property
    def lane(self) -> str:
        """The lane that its work counts for."""

    @property
    def depth(self) -> int:
        """How many subgroups may be between `start` and the end of their updates, in order."""

    def start(self, subgroup: int, fields: dict[str, torch.Tensor]) -> Callable[[], None]:
        """Begin to update the subgroup's fields and weights; return what ends it.

        That blocks until the fields are final, and the weights to whatever follows on the caller's stream. Neither is
        changed when it raises.
        """


@dataclass
class _Queue:
    """What is left to update. The read lane adds cold records in order; the updating lanes take from it."""

    warm: deque[int]
    bound: Mapping[int, str]
    cold: deque[tuple[int, Completion]] = field(default_factory=deque)
    reading: bool = True
    failure: BaseException | None = None
    opened: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add_cold(self, subgroup: int, fetch: Completion) -> None:
        with self.changed:
            self.cold.append((subgroup, fetch))
            self.changed.notify_all()
        fetch.add_done_callback(lambda _: self._wake())

    def end_reading(self) -> None:
        with self.changed:
            self.reading = False
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            if self.failure is None or isinstance(self.failure, StepInterrupted):
                self.failure = error
            self.changed.notify_all()

    def take(self, lane: str, *, front: bool, wait: bool) -> tuple[int, Completion | None] | None:
        """Return the next subgroup for a lane (with the fetch to wait for, if cold); None when nothing is left.

        Without `wait`, None as well when nothing is ready now.
        """
        with self.changed:
            while self.failure is None:
                allowed = [entry for entry in self.cold if self._may(lane, entry[0])]
                cold = next((entry for entry in allowed if entry[1].done()), next(iter(allowed), None))
                if cold is not None and cold[1].done():
                    return self._taken(cold)
                warm = next((i for i in (self.warm if front else reversed(self.warm)) if self._may(lane, i)), None)
                if warm is not None:
                    self.warm.remove(warm)
                    return warm, None
                if not wait or not (self.reading or cold is not None):
                    return None
                if cold is not None:
                    return self._taken(cold)
                self.changed.wait()
            return None

    def _may(self, lane: str, subgroup: int) -> bool:
        return self.bound.get(subgroup, lane) == lane

    def _taken(self, cold: tuple[int, Completion]) -> tuple[int, Completion]:
        self.cold.remove(cold)
        return cold

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


class Pipeline:
    """The lanes of one optimizer: threads that live as long as it does."""

    def __init__(self, store: Store, lanes: int) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(lanes + 1, thread_name_prefix="tierstep-lane")

    def run(
        self, plan: StepPlan, processors: Sequence[Processor], trace: Trace, on_updated: Callable[[int], None]
    ) -> None:
        """Update every subgroup of the plan; return when all are updated and every write has ended.

        The first processor works from the front end, another from the back end.

        `on_updated(subgroup)` is called once for each, on a lane's thread, right after its update. Raises the first
        error when everything that was under way has come to rest; subgroups that were reported stay updated, and
        their newest records are kept, in their homes or in slots.
        """
        queue = _Queue(deque(plan.warm), plan.bound)
        self._store.slots.interrupt(interrupted=False)
        works = [
            _Work(self._store, queue, processor, plan.keep, trace, on_updated, front=position == 0)
            for position, processor in enumerate(processors)
        ]
        self._run_lanes(plan, queue, works)
        for subgroup, _ in queue.cold:
            self._store.put_back(subgroup, changed=False)
        self._settle(queue)
        if queue.failure is not None:
            raise queue.failure

    def _run_lanes(self, plan: StepPlan, queue: _Queue, works: Sequence[_Work]) -> None:
        """Start the lanes and return when all have come to rest, also when the caller is interrupted (Ctrl-C).

        No lane begins before all are in the list: an interruption before that leaves nobody at work unseen.
        """
        lanes: list[Future[None]] = []
        try:
            lanes.append(self._threads.submit(self._read, plan, queue))
            lanes.extend(self._threads.submit(self._guard, work, queue) for work in works)
            queue.opened.set()
            wait(lanes)
        except BaseException as error:  # noqa: BLE001 - raised by run() when all is at rest
            queue.fail(error)
            self._store.slots.interrupt(interrupted=True)
            queue.opened.set()
            wait(lanes)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _read(self, plan: StepPlan, queue: _Queue) -> None:
        queue.opened.wait()
        try:
            if queue.failure is None:
                self._store.write_back(plan.write_back)
            for subgroup in plan.cold if queue.failure is None else ():
                queue.add_cold(subgroup, self._store.fetch(subgroup))
        except BaseException as error:  # noqa: BLE001 - carried to the thread that called run()
            queue.fail(error)
        finally:
            queue.end_reading()

    def _guard(self, work: _Work, queue: _Queue) -> None:
        queue.opened.wait()
        try:
            work.run()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that called run()
            queue.fail(error)
            self._store.slots.interrupt(interrupted=True)

    def _settle(self, queue: _Queue) -> None:
        try:
            self._store.settle()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that called run()
            queue.fail(error)


@dataclass
class _Work:
    """One updating lane's share of a step."""

    store: Store
    queue: _Queue
    processor: Processor
    keep: frozenset[int]
    trace: Trace
    on_updated: Callable[[int], None]
    front: bool
    under_way: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)

    def run(self) -> None:
        """Keep `depth` subgroups under way until nothing is left; what was begun is ended, also after a failure."""
        try:
            while self._start_next():
                if len(self.under_way) == self.processor.depth:
                    self._end_oldest()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        try:
            while self.under_way:
                self._end_oldest()
        finally:
            if self.under_way:
                self._end_all()

    def _start_next(self) -> bool:
        """Begin one more subgroup, or end one where there is nothing to begin yet; say whether there may be more."""
        waiting_since = time.perf_counter()
        task = self.queue.take(self.processor.lane, front=self.front, wait=not self.under_way)
        if task is None and self.under_way:
            self._end_oldest()
            return True
        if task is None:
            self.trace.add_stall(self.processor.lane, time.perf_counter() - waiting_since)
            return False
        subgroup, fetch = task
        fetch = fetch or self.store.fetch(subgroup)
        try:
            fetch.wait()
            self.trace.add_stall(self.processor.lane, time.perf_counter() - waiting_since)
            self.under_way.append((subgroup, self.processor.start(subgroup, self.store.take(subgroup))))
        except BaseException:
            self.store.put_back(subgroup, changed=False)
            raise
        return True

    def _end_oldest(self) -> None:
        subgroup, end = self.under_way.popleft()
        changed = False
        try:
            end()
            changed = True
            self.on_updated(subgroup)
        finally:
            self.store.put_back(subgroup, changed=changed, keep=subgroup in self.keep)
