"""A fixed number of threads that work off jobs in order."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

Job = Callable[[], None]


class WorkerPool:
    """Runs jobs on `count` threads, first come, first served. A job must not raise. Any thread may call it.

    The threads are daemons: a program that ends without closing the pool, or whose drive never answers, can end.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._pid = os.getpid()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def refusal(self) -> str | None:
        """Why no job is taken any more, or None. Threads do not survive a fork, so a child is refused too."""
        if self._closed:
            return "it is closed"
        if os.getpid() != self._pid:
            return f"it belongs to process {self._pid}; open another one after a fork"
        return None

    def add(self, job: Job) -> bool:
        """Queue a job behind all others; return False, without queueing it, when the pool is closed."""
        with self._changed:
            if self.refusal is None:
                self._jobs.append(job)
                self._changed.notify()
                return True
            return False

    def add_first(self, jobs: Iterable[Job]) -> None:
        """Queue the rest of a running job's work before all others; taken also while the pool is closing."""
        with self._changed:
            self._jobs.extendleft(reversed(list(jobs)))
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Finish all jobs and end the threads; return False when that takes longer than `timeout_s`. May be repeated.

        A job that is still running may queue more of its own work. Thread A sees an empty queue and ends, thread B's
        job then queues four more: B itself is still there and works them off, therefore nothing is left behind.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if os.getpid() != self._pid:
            return True
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            job()
            del job  # a waiting thread must not keep the last request's buffer alive
