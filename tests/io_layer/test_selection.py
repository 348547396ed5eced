"""Which backends there are, and why one is not."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tierstep.errors import ConfigError
from tierstep.io import extension
from tierstep.io.libaio import _require_contexts
from tierstep.io.selection import describe_backends, open_backend


@pytest.mark.parametrize(("name", "opened"), [("auto", "threads"), ("threads", "threads"), ("memory", "memory")])
def test_backends_open_by_name(name, opened):
    with open_backend(name, timeout_s=5) as backend:
        assert backend.name == opened


def test_an_unknown_name_is_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match="backend='spdk' is unknown: use one of auto, threads, uring, libaio, memory"):
        open_backend("spdk")


def test_libaio_needs_a_way_to_wrap_memory():
    with pytest.raises(ConfigError, match="as_tensor"):
        open_backend("libaio")


def test_describing_backends_neither_imports_deepspeed_nor_starts_a_compiler():
    code = (
        "import subprocess, sys; from tierstep.io.selection import describe_backends\n"
        "def refuse(*a, **k): raise SystemExit('started a program')\n"
        "subprocess.Popen = refuse\n"
        "print([(s.name, s.available, s.reason) for s in describe_backends()])\n"
        "assert 'deepspeed' not in sys.modules"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "('threads', True," in out


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with deepspeed, and whatever is put under `tmp_path`; returns what is there as a dict to change."""
    there = {"deepspeed": True, "libaio.h": True, "c++": True, "g++": True, "ninja": True}
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there.get(name) else None)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/usr/bin/{name}" if there.get(name) else None)
    monkeypatch.setattr(extension, "_has_header", lambda name: there[name])
    return there


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (["deepspeed"], "deepspeed is not installed"),
        (["libaio.h"], "apt-get install libaio-dev"),
        (["c++", "g++"], "no C\\+\\+ compiler"),
        (["ninja"], "pip install ninja"),
    ],
)
def test_what_is_missing_for_libaio_is_said_in_words(machine, missing, reason):
    machine.update(dict.fromkeys(missing, False))
    with pytest.raises(ConfigError, match=reason):
        open_backend("libaio", as_tensor=memoryview, build=True)
    status = {s.name: s for s in describe_backends()}
    assert not status["libaio"].available
    assert status["threads"].available


def test_libaio_is_not_compiled_unless_asked_for(machine):
    assert "not built yet" in extension.why_unavailable()
    assert extension.why_unavailable(build=True) is None
    with pytest.raises(ConfigError, match="build=True"):
        open_backend("libaio", as_tensor=memoryview)


def test_a_built_extension_needs_no_compiler(machine, tmp_path):
    for name in extension.EXTENSIONS:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    machine.update({"libaio.h": False, "c++": False, "g++": False, "ninja": False})
    assert extension.why_unavailable() is None


def test_too_few_kernel_contexts_are_refused_before_they_abort_the_process(tmp_path):
    (tmp_path / "aio-nr").write_text("65500\n")
    (tmp_path / "aio-max-nr").write_text("65536\n")
    _require_contexts(36, tmp_path)
    _require_contexts(10**9, Path("/nonexistent"))
    with pytest.raises(ConfigError, match="37 asynchronous operations .* 36 of 65536 are free"):
        _require_contexts(37, tmp_path)
