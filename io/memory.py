"""A backend without a drive, for tests: files are bytes in memory, and faults happen exactly when asked for."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from tierstep.errors import DiskFull, TransferError, TransferTimeout
from tierstep.io.backend import DEFAULT_TIMEOUT_S, IoBackend
from tierstep.io.failures import retry_interrupted, transfer_error
from tierstep.io.faults import Fail, Fault, Hold, Interrupt, Kind, Operation, Short
from tierstep.io.requests import Completion, Read, Request

__all__ = ["Fail", "Fault", "Hold", "Interrupt", "MemoryBackend", "Operation", "Short"]


class MemoryBackend(IoBackend):
    """Files in memory; transfers complete within `submit` unless a `Hold` strikes. Any thread may call it.

    `log` lists every operation in the order of the calls. `capacity_bytes` is the size of the drive (None: endless).
    """

    name = "memory"

    def __init__(self, *, capacity_bytes: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.capacity_bytes = capacity_bytes
        self.timeout_s = timeout_s
        self.log: list[Operation] = []
        self.files: dict[Path, bytearray] = {}
        self._faults: list[tuple[Fault, Callable[[Operation], bool]]] = []
        self._changed = threading.Condition()
        self._in_flight = 0
        self._closed = False

    def inject(
        self, fault: Fault, *, at: int | None = None, when: Callable[[Operation], bool] = lambda operation: True
    ) -> None:
        """Let `fault` strike the operation with index `at`, or all for which `when` says so. The first match counts."""
        self._faults.append((fault, when if at is None else lambda operation: operation.index == at))

    def heal(self) -> None:
        """Forget all faults; what a `Hold` holds stays held until its `release`."""
        self._faults.clear()

    def allocate(self, path: Path, nbytes: int) -> None:
        """See `IoBackend.allocate`."""
        operation, fault = self._start("allocate", path, nbytes=nbytes)
        self._strike(operation, fault, f"allocation of {nbytes} bytes for {path}")
        with self._changed:
            present = self.files.get(path, bytearray())
            self._require_space(f"allocation of {nbytes} bytes for {path}", path, nbytes - len(present))
            file = self.files.setdefault(path, present)  # changed in place, for other names may lead to it
            del file[nbytes:]
            file.extend(bytes(nbytes - len(file)))

    def remove(self, path: Path) -> None:
        """See `IoBackend.remove`."""
        operation, fault = self._start("remove", path)
        self._strike(operation, fault, f"removal of {path}")
        with self._changed:
            self.files.pop(path, None)

    def link(self, path: Path, target: Path) -> bool:
        """See `IoBackend.link`. Returns False for a `target` in a real directory."""
        operation, fault = self._start("link", path)
        words = f"link of {path} to {target}"
        self._strike(operation, fault, words)
        if target.parent.is_dir():
            return False  # whoever looks there, such as the reader of a checkpoint, would find no file
        with self._changed:
            if path not in self.files:
                raise transfer_error(words, target, _os_error(errno.ENOENT))
            if target in self.files:
                raise transfer_error(words, target, _os_error(errno.EEXIST))
            self.files[target] = self.files[path]
        return True

    def link_count(self, path: Path) -> int:
        """See `IoBackend.link_count`."""
        operation, fault = self._start("link_count", path)
        self._strike(operation, fault, f"look at {path}")
        with self._changed:
            if path not in self.files:
                raise transfer_error(f"look at {path}", path, _os_error(errno.ENOENT))
            return sum(file is self.files[path] for file in self.files.values())

    def submit(self, request: Request) -> Completion:
        """See `IoBackend.submit`."""
        completion = Completion(request, self.timeout_s)
        with self._changed:
            if self._closed:
                raise TransferError(f"{request} refused by backend memory: it is closed", path=request.path)
            self._in_flight += 1
        kind: Kind = "read" if isinstance(request, Read) else "write"
        operation, fault = self._start(kind, request.path, request.offset, request.buffer.nbytes)
        perform = partial(self._perform, completion, operation, fault)
        if not fault.defer(perform):
            perform()
        return completion

    def close(self) -> None:
        """See `IoBackend.close`."""
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: not self._in_flight, deadline - time.monotonic()):
                raise TransferTimeout(f"backend memory still has {self._in_flight} transfers under way")

    def _start(self, kind: Kind, path: Path, offset: int = 0, nbytes: int = 0) -> tuple[Operation, Fault]:
        with self._changed:
            operation = Operation(len(self.log), kind, path, offset, nbytes)
            self.log.append(operation)
        return operation, next((fault for fault, when in self._faults if when(operation)), Fault())

    def _perform(self, completion: Completion, operation: Operation, fault: Fault) -> None:
        error: BaseException | None = None
        try:
            self._strike(operation, fault, str(completion.request))
            with self._changed:
                self._move(completion.request, fault)
        except BaseException as raised:  # noqa: BLE001 - it appears in `wait`
            error = raised
        completion.finish(error)
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    def _strike(self, operation: Operation, fault: Fault, words: str) -> None:
        attempts = count()
        try:
            retry_interrupted(lambda: fault.strike(next(attempts)))
        except OSError as error:
            raise transfer_error(words, operation.path, error) from error

    def _move(self, request: Request, fault: Fault) -> None:
        memory = request.buffer.cast("B") if request.buffer.nbytes else memoryview(bytearray())
        if isinstance(request, Read):
            moved = self._read(request, memory[: fault.moved_bytes(memory.nbytes)])
        else:
            moved = self._write(request, memory[: fault.moved_bytes(memory.nbytes)])
        if moved < memory.nbytes:
            reason = "does the file end there?" if isinstance(request, Read) else "is the drive full?"
            message = f"{request} stopped after {moved} of {memory.nbytes} bytes; {reason}"
            raise TransferError(message, path=request.path)

    def _read(self, request: Request, memory: memoryview) -> int:
        if request.path not in self.files:
            raise transfer_error(request, request.path, _os_error(errno.ENOENT))
        found = self.files[request.path][request.offset : request.offset + memory.nbytes]
        memory[: len(found)] = found
        return len(found)

    def _write(self, request: Request, memory: memoryview) -> int:
        present = self.files.get(request.path, bytearray())
        end = request.offset + memory.nbytes
        self._require_space(str(request), request.path, end - len(present))
        file = self.files.setdefault(request.path, present)
        file.extend(bytes(max(0, end - len(file))))
        file[request.offset : end] = memory
        return memory.nbytes

    def _require_space(self, words: str, path: Path, more_bytes: int) -> None:
        if self.capacity_bytes is None or more_bytes <= 0:
            return
        files = {id(file): file for file in self.files.values()}  # one of several names takes no space of its own
        free = self.capacity_bytes - sum(map(len, files.values()))
        if more_bytes > free:
            message = f"{words} failed: {more_bytes} more bytes are needed and {free} are free; free some space"
            raise DiskFull(message, path=path, errno=errno.ENOSPC)


def _os_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
