"""One io_uring: queues that a thread shares with the kernel, straight on the system calls (io_uring(7))."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstep.io.failures import retry_interrupted

SETUP, ENTER = 425, 426  # numbers of the system calls, on every architecture since Linux 5.1
ENTER_GETEVENTS = 1
OP_READ, OP_WRITE = 22, 23
FEATURE_SINGLE_MMAP, FEATURE_RW_CUR_POS = 1 << 0, 1 << 3  # the second came with OP_READ and OP_WRITE, in Linux 5.6
OFFSET_RINGS, OFFSET_ENTRIES = 0, 0x10000000
DISABLED = Path("/proc/sys/kernel/io_uring_disabled")

_WORD = struct.Struct("I")  # in native byte order it is moved as one word, which the kernel may read at any time
_ENTRY = struct.Struct("=BBHiQQIIQ24x")  # opcode, flags, priority, descriptor, offset, address, length, flags, number
_RESULT = struct.Struct("=QiI")  # number, bytes moved or negative errno, flags


class _Parameters(ctypes.Structure):
    """`struct io_uring_params`; the offsets are those of the fields within the mapped queues."""

    _fields_ = (
        ("sq_entries", ctypes.c_uint32),
        ("cq_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("sq_thread_cpu", ctypes.c_uint32),
        ("sq_thread_idle", ctypes.c_uint32),
        ("features", ctypes.c_uint32),
        ("wq_fd", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 3),
        ("sq_head", ctypes.c_uint32),
        ("sq_tail", ctypes.c_uint32),
        ("sq_mask", ctypes.c_uint32),
        ("sq_rest", ctypes.c_uint32 * 3),
        ("sq_array", ctypes.c_uint32),
        ("sq_reserved", ctypes.c_uint32 * 3),
        ("cq_head", ctypes.c_uint32),
        ("cq_tail", ctypes.c_uint32),
        ("cq_mask", ctypes.c_uint32),
        ("cq_entries_offset", ctypes.c_uint32),
        ("cq_overflow", ctypes.c_uint32),
        ("cq_results", ctypes.c_uint32),
        ("cq_reserved", ctypes.c_uint32 * 4),
    )


@dataclass(frozen=True)
class Transfer:
    """One read or write: `nbytes` between memory at `address` and the open file `descriptor` at byte `offset`."""

    descriptor: int
    address: int
    nbytes: int
    offset: int


class Ring:
    """An io_uring for up to `depth` transfers at once, for one thread at a time. Raises `OSError` where it is refused.

    The kernel looks at submitted entries only inside `transfer`'s own system call, on the same thread, so they need no
    memory barrier. Results are looked at only after a system call that has waited for them.
    """

    def __init__(self, depth: int) -> None:
        self._parameters = _Parameters()
        self._descriptor: int | None = _system_call(SETUP, depth, ctypes.addressof(self._parameters), 0, 0)
        self.depth = depth
        try:
            self._require_features()
            self._queues, self._entries = self._map()
        except BaseException:
            os.close(self._descriptor)
            raise

    def transfer(self, transfers: Sequence[Transfer], *, reading: bool) -> list[int]:
        """Do at most `depth` transfers at once; return each one's moved bytes, or its negative errno.

        Blocks without the GIL until all have ended: none is under way when this returns, so memory may be freed.
        """
        results = [-errno.ECANCELED] * len(transfers)
        for number, transfer in enumerate(transfers):
            self._queue(number, transfer, reading=reading)
        waiting, under_way = len(transfers), 0
        while waiting or under_way:
            try:
                submitted = self._enter(waiting, waiting + under_way)
            except OSError as error:
                results[len(transfers) - waiting :] = [-(error.errno or errno.EIO)] * waiting
                self._unqueue(waiting)
                waiting = 0
                continue
            waiting -= submitted
            under_way += submitted - self._collect(results)
        return results

    def close(self) -> None:
        """Give the queues back to the kernel. May be called again; not during a `transfer`."""
        if self._descriptor is not None:
            self._queues.close()
            self._entries.close()
            os.close(self._descriptor)
            self._descriptor = None

    def _require_features(self) -> None:
        needed = FEATURE_SINGLE_MMAP | FEATURE_RW_CUR_POS
        if self._parameters.features & needed != needed:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def _map(self) -> tuple[mmap.mmap, mmap.mmap]:
        """Map both queues, which lie in one piece, and the entries that the submission queue points to."""
        parameters, descriptor = self._parameters, self._open_descriptor
        queues_nbytes = max(
            parameters.sq_array + parameters.sq_entries * _WORD.size,
            parameters.cq_results + parameters.cq_entries * _RESULT.size,
        )
        queues = mmap.mmap(descriptor, queues_nbytes, offset=OFFSET_RINGS)
        try:
            return queues, mmap.mmap(descriptor, parameters.sq_entries * _ENTRY.size, offset=OFFSET_ENTRIES)
        except BaseException:
            queues.close()
            raise

    def _queue(self, number: int, transfer: Transfer, *, reading: bool) -> None:
        parameters = self._parameters
        tail = self._word(parameters.sq_tail)
        index = tail & self._word(parameters.sq_mask)
        operation = OP_READ if reading else OP_WRITE
        place = (transfer.descriptor, transfer.offset, transfer.address, transfer.nbytes)
        _ENTRY.pack_into(self._entries, index * _ENTRY.size, operation, 0, 0, *place, 0, number)
        self._set_word(parameters.sq_array + index * _WORD.size, index)
        self._set_word(parameters.sq_tail, tail + 1)

    def _unqueue(self, count: int) -> None:
        """Take back entries that the kernel has not taken."""
        tail = self._word(self._parameters.sq_tail)
        self._set_word(self._parameters.sq_tail, tail - count)

    def _enter(self, submit: int, wait_for: int) -> int:
        """Hand over queued entries and wait for results; return how many entries the kernel took."""
        arguments = (self._open_descriptor, submit, wait_for, ENTER_GETEVENTS)
        return retry_interrupted(lambda: _system_call(ENTER, *arguments))

    def _collect(self, results: list[int]) -> int:
        """Take the results that are there; return how many."""
        parameters = self._parameters
        head, tail = self._word(parameters.cq_head), self._word(parameters.cq_tail)
        count = (tail - head) % 2**32
        for position in range(head, head + count):
            index = position & self._word(parameters.cq_mask)
            number, moved, _ = _RESULT.unpack_from(self._queues, parameters.cq_results + index * _RESULT.size)
            results[number] = moved
        self._set_word(parameters.cq_head, tail)
        return count

    @property
    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError("the ring is closed")
        return self._descriptor

    def _word(self, offset: int) -> int:
        return int(_WORD.unpack_from(self._queues, offset)[0])

    def _set_word(self, offset: int, value: int) -> None:
        _WORD.pack_into(self._queues, offset, value % 2**32)


def why_unavailable() -> str | None:
    """Say what keeps this process from using io_uring; None when nothing does. Tries it out, for an instant."""
    try:
        Ring(1).close()
    except OSError as error:
        return _explain(error)
    return None


def _explain(error: OSError) -> str:
    if error.errno == errno.ENOSYS:
        return "the kernel has no io_uring that can read and write: Linux 5.6 or newer is needed"
    if error.errno == errno.EPERM:
        return _explain_refusal()
    if error.errno == errno.ENOMEM:
        return "the limit of locked memory leaves no room for its queues: raise it (ulimit -l)"
    return f"the kernel refuses it: {os.strerror(error.errno or errno.EIO)}"


def _explain_refusal() -> str:
    try:
        level = DISABLED.read_text().strip()
    except OSError:
        level = "0"
    if level == "2":
        return "it is switched off on this machine: set kernel.io_uring_disabled=0 (sysctl)"
    if level == "1":
        return (
            "it is kept for one group of users: set kernel.io_uring_disabled=0 (sysctl), or join kernel.io_uring_group"
        )
    return "this process may not use it (EPERM): most container runtimes forbid it; allow the io_uring system calls"


def _system_call(number: int, *arguments: int) -> int:
    """Make a system call without the GIL. Raises `OSError`."""
    words = [ctypes.c_long(argument) for argument in (number, *arguments, 0, 0)]
    answer = int(_libc.syscall(*words))
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return answer


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
