"""Transfers through DeepSpeed's libaio extension, fenced in, because it looks at no result of the kernel.

What the extension (0.19) does when something goes wrong, and what keeps it from happening here:

- an unaligned size leaves an empty file or an untouched buffer: only aligned spans are given to it;
- writing into a full drive truncates: only bytes that the file already has are written by it;
- reading past the end, waiting with nothing pending, failing to lock memory, too few kernel contexts: each aborts
  the process: sizes and limits are looked at first, and only calls that wait by themselves are made;
- foreign memory is copied through memory that is locked anew each time: every handle has its own locked memory;
- a failed or short transfer reports success: see `GuardedHandle`.

Each doubt is settled by moving the block again with the reference backend's code, which succeeds or has the reason.

What is left: the last sector of each block is looked at. A drive that fails inside a block, writes its end all the
same, and reports the error only to the one who asks, goes unnoticed. The reference backend asks; it is the default.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from tierstep.errors import ConfigError
from tierstep.io.backend import DEFAULT_TIMEOUT_S
from tierstep.io.buffers import PageBuffer
from tierstep.io.extension import load_extension
from tierstep.io.guards import BLOCK_BYTES, PIECE_BYTES, AsTensor, GuardedHandle
from tierstep.io.handles import HandleBackend

HANDLES = 4
"""DeepSpeed waits for a handle as a whole, so each request under way needs one of its own."""
QUEUE_DEPTH = PIECE_BYTES // BLOCK_BYTES
CONTEXTS_PER_HANDLE = 2


class LibaioBackend(HandleBackend):
    """Moves aligned spans through libaio, all else as `ThreadBackend` does. See `IoBackend` for what it promises.

    An explicit `close` is needed: a handle that is alive when the interpreter ends may abort it (a program that forgets
    is helped out).
    """

    name = "libaio"

    def __init__(self, handles: Sequence[GuardedHandle], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(handles, piece_bytes=PIECE_BYTES, timeout_s=timeout_s)
        atexit.register(self.close)

    def close(self) -> None:
        """See `IoBackend.close`."""
        super().close()
        if not self._inherited:
            atexit.unregister(self.close)


def open_libaio(
    as_tensor: AsTensor | None, *, timeout_s: float = DEFAULT_TIMEOUT_S, build: bool = False
) -> LibaioBackend:
    """Open the backend. `as_tensor` wraps writable bytes, without copying, in what DeepSpeed takes.

    Never compiles unless `build` is given. Raises `ConfigError` that says what is missing, or which limit is too low.
    """
    if as_tensor is None:
        raise ConfigError("backend libaio needs as_tensor, which wraps a memoryview in what deepspeed takes")
    extension = load_extension(build=build)
    _require_lockable(HANDLES * PIECE_BYTES)
    _require_contexts(HANDLES * CONTEXTS_PER_HANDLE * QUEUE_DEPTH)
    handles = [
        extension.aio_handle(block_size=BLOCK_BYTES, queue_depth=QUEUE_DEPTH, overlap_events=True)
        for _ in range(HANDLES)
    ]
    return LibaioBackend([GuardedHandle(handle, as_tensor) for handle in handles], timeout_s=timeout_s)


def _require_lockable(nbytes: int) -> None:
    """Lock as much memory as the extension will, for a moment: it aborts the process where that fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    with PageBuffer(nbytes) as buffer:
        address, length = ctypes.c_void_p(buffer.address), ctypes.c_size_t(nbytes)
        if libc.mlock(address, length) != 0:
            why = os.strerror(ctypes.get_errno())
            raise ConfigError(
                f"backend libaio needs {nbytes} bytes of locked memory: {why}; raise the limit (ulimit -l) or use "
                "backend threads"
            )
        libc.munlock(address, length)


def _require_contexts(count: int, root: Path = Path("/proc/sys/fs")) -> None:
    """Look at the kernel's limit of asynchronous operations: the extension aborts the process where it is reached."""
    try:
        used, limit = (int((root / name).read_text()) for name in ("aio-nr", "aio-max-nr"))
    except (OSError, ValueError):
        return
    if used + count > limit:
        raise ConfigError(
            f"backend libaio needs {count} asynchronous operations of the kernel and {limit - used} of {limit} are "
            "free: raise fs.aio-max-nr (sysctl) or use backend threads"
        )
