"""An accelerator without a device: its work is done late, in any order that the marks allow, chosen by a seed.

Nothing runs before somebody waits for it, so a slot that is used again too early, a wait that is missing, or a result
that the caller is not told to wait for shows as wrong bits.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque

import torch


class FakeMark:
    def __init__(self, accelerator, stream, position):
        self.accelerator = accelerator
        self.stream = stream
        self.position = position

    def passed(self):
        return self.stream is None or self.stream.done >= self.position

    def wait(self):
        self.accelerator.run_until(self)

    def seconds_since(self, earlier):
        self.wait()
        return self.stream.times[self.position] - earlier.stream.times[earlier.position]


class FakeStream:
    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.todo = deque()
        self.given = self.done = 0
        self.times = [time.perf_counter()]  # when the first so many items were done

    def run(self, work):
        with self.accelerator.lock:
            self._add(work)

    def after(self, mark):
        with self.accelerator.lock:
            self._add(mark)

    def mark(self):
        with self.accelerator.lock:
            return FakeMark(self.accelerator, self, self.given)

    def _add(self, item):
        self.todo.append(item)
        self.given += 1

    def can_go_on(self):
        return bool(self.todo) and not (isinstance(self.todo[0], FakeMark) and not self.todo[0].passed())

    def go_on(self):
        item = self.todo.popleft()
        if not isinstance(item, FakeMark):
            item()
        self.done += 1
        self.times.append(time.perf_counter())


class FakeAccelerator:
    """`settle_caller` does what the caller's stream was told to wait for, and nothing else."""

    def __init__(self, seed=0):
        self.device = torch.device("cpu")
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.streams = []
        self.callers_stream = FakeStream(self)

    def free_bytes(self):
        return 1 << 30

    def stream(self):
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def caller(self):
        return self.callers_stream

    def run_until(self, mark):
        with self.lock:
            while not mark.passed():
                able = [stream for stream in [*self.streams, self.callers_stream] if stream.can_go_on()]
                assert able, "every stream waits for another one"
                self.random.choice(able).go_on()

    def settle_caller(self):
        self.run_until(self.callers_stream.mark())
