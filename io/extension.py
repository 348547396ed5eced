"""DeepSpeed's compiled libaio extension: what is missing for it, in words, and loading it without surprises."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from tierstep.errors import ConfigError

EXTENSIONS = ("pin_memory", "async_io")
"""In loading order: the second looks up symbols of the first."""


def why_unavailable(*, build: bool = False) -> str | None:
    """Say what keeps the extension from being loaded (or from being built and loaded); None when nothing does.

    Looks at files only: imports nothing and compiles nothing.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed: pip install 'tierstep[nvme]'"
    if find_built() is not None:
        return None
    reason = _why_not_buildable()
    if reason is not None or build:
        return reason
    return "deepspeed's async_io extension is not built yet: open the backend once with build=True (takes minutes)"


def load_extension(*, build: bool = False) -> ModuleType:
    """Import the extension; compile it first, for minutes, only if that is needed and `build` says so. Blocks.

    Raises `ConfigError` that says what is missing.
    """
    reason = why_unavailable(build=build)
    if reason is not None:
        raise ConfigError(f"backend libaio is not available: {reason}; backend threads works without it")
    builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    if builder.name in builder._loaded_ops:
        return _as_module(builder.load(verbose=False))
    return _import_or_build(builder, build=build)


def _import_or_build(builder: Any, *, build: bool) -> ModuleType:  # noqa: ANN401 - DeepSpeed has no types
    built = find_built()
    try:
        if built is None:
            return _as_module(builder.load(verbose=False))
        try:
            return _import_built(builder, built)
        except ImportError:  # built for other versions
            if not build:
                raise
            return _as_module(builder.load(verbose=False))
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"backend libaio is not available: {error}; open it once with build=True to build it anew, or use "
            "backend threads"
        ) from error


def find_built() -> tuple[Path, ...] | None:
    """Return the files of the built extensions in loading order, the newest build first; None if there is none."""
    found = [tuple(folder / name / f"{name}.so" for name in EXTENSIONS) for folder in _build_folders()]
    complete = [files for files in found if all(file.is_file() for file in files)]
    return max(complete, key=lambda files: files[-1].stat().st_mtime, default=None)


def _build_folders() -> Iterator[Path]:
    """Yield where compiled extensions go: the folder that the environment names, or one a Python version and device."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        yield Path(chosen)
    else:
        version = f"py{sys.version_info.major}{sys.version_info.minor}"
        yield from (Path.home() / ".cache").glob(f"*_extensions/{version}_*")


def _why_not_buildable() -> str | None:
    if not _has_header("libaio.h"):
        return "the header libaio.h is missing: apt-get install libaio-dev (or dnf install libaio-devel)"
    if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        return "there is no C++ compiler: apt-get install g++"
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts) is None:
        return "ninja is missing: pip install ninja"
    return None


def _has_header(name: str) -> bool:
    named = os.environ.get("CPATH", "").split(os.pathsep) + os.environ.get("CPLUS_INCLUDE_PATH", "").split(os.pathsep)
    folders = [*filter(None, named), "/usr/include", "/usr/local/include", str(Path(sys.prefix) / "include")]
    return any((Path(folder) / name).is_file() for folder in folders)


def _import_built(builder: Any, files: tuple[Path, ...]) -> ModuleType:  # noqa: ANN401
    """Import built files as they are: DeepSpeed's own loader would compile again whenever it finds a reason to.

    What is imported goes into DeepSpeed's table, since importing the same types twice into a process fails.
    """
    modules = [_import_globally(name, file) for name, file in zip(EXTENSIONS, files, strict=True)]
    builder._loaded_ops.update(zip(EXTENSIONS, modules, strict=True))
    return modules[-1]


def _import_globally(name: str, file: Path) -> ModuleType:
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    try:
        loader = ExtensionFileLoader(name, str(file))
        spec = importlib.util.spec_from_file_location(name, file, loader=loader)
        if spec is None:
            raise ImportError(f"{file} is not an extension module")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    finally:
        sys.setdlopenflags(flags)


def _as_module(loaded: object) -> ModuleType:
    if not isinstance(loaded, ModuleType):
        raise ImportError("deepspeed returned no extension module")
    return loaded
