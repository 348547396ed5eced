"""Choosing a backend by name, and saying which ones this machine has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierstep.errors import ConfigError
from tierstep.io import extension, ring
from tierstep.io.backend import DEFAULT_TIMEOUT_S, IoBackend
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
    as_tensor: Callable[[memoryview], object] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    threads: int = DEFAULT_THREADS,
    build: bool = False,
) -> IoBackend:
    """Open the backend called `name`; close it, or use it in a `with` block.

    "auto" is "threads": libaio, which needs DeepSpeed, is used only when asked for by name. `as_tensor` (libaio only)
    wraps bytes without copying; `build` (libaio only) allows it to compile for minutes. Raises `ConfigError` for an
    unknown name and for a backend that is not available here, with the reason.
    """
    if name in ("auto", "threads"):
        return ThreadBackend(threads=threads, timeout_s=timeout_s)
    if name == "uring":
        return open_uring(timeout_s=timeout_s)
    if name == "memory":
        return MemoryBackend(timeout_s=timeout_s)
    if name == "libaio":
        from tierstep.io.libaio import open_libaio

        return open_libaio(as_tensor, timeout_s=timeout_s, build=build)
    raise ConfigError(f"backend={name!r} is unknown: use one of {', '.join(BACKENDS)}")


def describe_backends() -> list[BackendStatus]:
    """Return the state of every backend. Imports nothing and compiles nothing."""
    return [
        BackendStatus("threads", available=True, reason="always works; the default"),
        _status("uring", ring.why_unavailable(), "the kernel allows io_uring"),
        _status("libaio", extension.why_unavailable(), "deepspeed's async_io extension is built"),
        BackendStatus("memory", available=True, reason="for tests: keeps files in memory"),
    ]


def _status(name: str, missing: str | None, works: str) -> BackendStatus:
    return BackendStatus(name, available=missing is None, reason=missing or works)
