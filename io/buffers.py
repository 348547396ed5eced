"""Memory that transfers run fast on: page-aligned, on huge pages, and not a byte larger than asked."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from tierstep.io.alignment import align_down

HUGE_PAGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # include/uapi/asm-generic/mman-common.h
POPULATE_BYTES, POPULATE_THREADS = 64 << 20, 8


class PageBuffer:
    """Private memory of exactly `nbytes` bytes, zero at first, that takes no RAM until it is touched.

    It starts at a multiple of 4 KiB, or of 2 MiB where it holds a whole huge page; those whole pages are huge where
    the system allows it (drives moved data to them 1.8 to 2.1 times faster than to 4 KiB pages, see docs/log.md). The
    rest is on small pages, so at most a page more than asked becomes resident. Raises `MemoryError`.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        whole_bytes = align_down(nbytes, HUGE_PAGE_BYTES)
        memory, address = _map_private(max(1, nbytes + (HUGE_PAGE_BYTES if whole_bytes else 0)))
        start = -address % HUGE_PAGE_BYTES if whole_bytes else 0
        self.address = address + start
        _advise(memory, "MADV_HUGEPAGE", start, whole_bytes)
        _advise(memory, "MADV_NOHUGEPAGE", start + whole_bytes, len(memory) - start - whole_bytes)
        self._view: memoryview | None = memoryview(memory)[start : start + nbytes]

    @property
    def view(self) -> memoryview:
        """The bytes, writable. Slices of it stay valid after `close`."""
        if self._view is None:
            raise ValueError(f"the buffer of {self.nbytes} bytes is closed")
        return self._view

    def populate(self) -> None:
        """Make every page resident now, on several threads, where the kernel can (Linux 5.14); else that comes later.

        Blocks. Huge pages stay huge.
        """
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        starts = range(0, self.nbytes, POPULATE_BYTES)
        with ThreadPoolExecutor(POPULATE_THREADS) as threads:
            for start in starts:
                nbytes = min(POPULATE_BYTES, self.nbytes - start)
                threads.submit(advise, self.address + start, nbytes, MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Give up the memory. It is freed when the last slice of `view` is gone, so no slice ever dangles."""
        self._view = None

    def __enter__(self) -> PageBuffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of a writable or read-only buffer; 0 for an empty one."""
    if not memory.nbytes:
        return 0
    view = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(view), 0)
    try:
        return int(view.buf)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))


class _PyBuffer(ctypes.Structure):
    """CPython's `Py_buffer` (part of the stable ABI); ctypes itself shows the address of writable buffers only."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _map_private(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map anonymous memory that is private: the shared kind, Python's default, gets no huge pages."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {nbytes} bytes of memory left: {error.strerror}") from error
    return memory, address_of(memoryview(memory))


def _advise(memory: mmap.mmap, advice: str, start: int, nbytes: int) -> None:
    """Tell the kernel how to page a part; a kernel or a Python that does not know the advice is fine."""
    option = getattr(mmap, advice, None)
    if option is None or nbytes <= 0:
        return
    with contextlib.suppress(OSError):
        memory.madvise(option, start, nbytes)
