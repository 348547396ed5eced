"""Choosing a backend by name, and saying which ones this machine has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstep.errors import ConfigError
from tierstep.io import extension, ring
from tierstep.io.backend import DEFAULT_TIMEOUT_S, IoBackend
from tierstep.io.engines import Engine, choose_engine
from tierstep.io.memory import MemoryBackend
from tierstep.io.threads import DEFAULT_THREADS, ThreadBackend
from tierstep.io.uring import open_uring

BACKENDS = ("auto", "threads", "uring", "libaio", "memory")


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can be opened on this machine, and the reason in words."""

    name: str
    available: bool
    reason: str


def open_backend(
    name: str,
    *,
    directories: Sequence[Path] = (),
    as_tensor: Callable[[memoryview], object] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    threads: int = DEFAULT_THREADS,
    build: bool = False,
) -> IoBackend:
    """Open the backend called `name`; close it, or use it in a `with` block.

    "auto" is what `tierstep calibrate` has measured best for `directories`, and "threads" where it has not; libaio,
    which needs DeepSpeed, is among it only where it is built. `as_tensor` (libaio only) wraps bytes without copying;
    `build` (libaio only) allows it to compile for minutes. Raises `ConfigError` for an unknown name and for a backend
    that is not available here, with the reason.
    """
    if name == "auto":
        return open_engine(choose_engine(directories).engine, as_tensor=as_tensor, timeout_s=timeout_s)
    if name == "threads":
        return ThreadBackend(threads=threads, timeout_s=timeout_s)
    if name == "uring":
        return open_uring(timeout_s=timeout_s)
    if name == "memory":
        return MemoryBackend(timeout_s=timeout_s)
    if name == "libaio":
        from tierstep.io.libaio import open_libaio

        return open_libaio(as_tensor, timeout_s=timeout_s, build=build)
    raise ConfigError(f"backend={name!r} is unknown: use one of {', '.join(BACKENDS)}")


def open_engine(
    engine: Engine,
    *,
    as_tensor: Callable[[memoryview], object] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> IoBackend:
    """Open a backend with the numbers of `engine` (those of libaio are fixed). Raises as `open_backend` does."""
    if engine.backend == "threads":
        return ThreadBackend(threads=engine.threads, block_bytes=engine.block_bytes, timeout_s=timeout_s)
    if engine.backend == "uring":
        return open_uring(rings=engine.threads, depth=engine.depth, block_bytes=engine.block_bytes, timeout_s=timeout_s)
    return open_backend(engine.backend, as_tensor=as_tensor, timeout_s=timeout_s)


def describe_backends(directories: Sequence[Path] = ()) -> list[BackendStatus]:
    """Return the state of every backend, then what "auto" takes in each of some directories, which must exist.

    Imports nothing and compiles nothing.
    """
    choices = [(directory, choose_engine([directory])) for directory in directories]
    taken = [(f"auto in {directory}", f"takes {choice.engine}; {choice.reason}") for directory, choice in choices]
    return [
        BackendStatus("threads", available=True, reason="always works; the default"),
        _status("uring", ring.why_unavailable(), "the kernel allows io_uring"),
        _status("libaio", extension.why_unavailable(), "deepspeed's async_io extension is built"),
        BackendStatus("memory", available=True, reason="for tests: keeps files in memory"),
        *(BackendStatus(name, available=True, reason=reason) for name, reason in taken),
    ]


def _status(name: str, missing: str | None, works: str) -> BackendStatus:
    return BackendStatus(name, available=missing is None, reason=missing or works)
