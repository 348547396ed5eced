"""What this machine has that tierstep can use, and why not the rest."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tierstep.engine.adamw.native import KernelStatus, status
from tierstep.errors import ConfigError
from tierstep.io.directories import DirectoryProbe, probe_directory
from tierstep.io.selection import BackendStatus, describe_backends
from tierstep.tiers.memory import available_bytes, total_bytes
from tierstep.version import __version__

PACKAGES = ("torch", "transformers", "numpy", "deepspeed")
TOOLS = ("g++", "clang++", "nvcc", "ninja")


@dataclass(frozen=True)
class MemoryStatus:
    """Host memory in bytes: the machine's, what the control group leaves of it, and what is free now."""

    machine_bytes: int
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class DirectoryStatus:
    """A directory and what it can do, or why it cannot be used."""

    path: Path
    probe: DirectoryProbe | None
    problem: str | None


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `tierstep doctor` says. Missing packages and tools are None."""

    versions: dict[str, str | None]
    devices: tuple[str, ...]
    cores: int
    tools: dict[str, str | None]
    kernel: KernelStatus
    backends: tuple[BackendStatus, ...]
    memory: MemoryStatus
    directories: tuple[DirectoryStatus, ...]

    @property
    def problems(self) -> list[str]:
        """Why directories that were asked about cannot be used."""
        return [directory.problem for directory in self.directories if directory.problem is not None]


def examine(directories: Sequence[Path]) -> Diagnosis:
    """Look around; compiles nothing and leaves no file behind. Blocks for less than a second."""
    looked_at = tuple(_directory(path) for path in directories)
    return Diagnosis(
        versions=_versions(),
        devices=_devices(),
        cores=len(psutil.Process().cpu_affinity()),
        tools={tool: _tool_version(tool) for tool in TOOLS},
        kernel=status(),
        backends=tuple(describe_backends([found.path for found in looked_at if found.probe is not None])),
        memory=MemoryStatus(int(psutil.virtual_memory().total), total_bytes(), available_bytes()),
        directories=looked_at,
    )


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"tierstep": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _devices() -> tuple[str, ...]:
    return ("cpu", *(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())))


def _tool_version(tool: str) -> str | None:
    path = shutil.which(tool)
    if path is None:
        return None
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10)
    line = next((line for line in answer.stdout.splitlines() if line.strip()), "no version told")
    return f"{path}: {line.strip()}"


def _directory(path: Path) -> DirectoryStatus:
    try:
        return DirectoryStatus(path, probe_directory(path), None)
    except ConfigError as error:
        return DirectoryStatus(path, None, str(error))
