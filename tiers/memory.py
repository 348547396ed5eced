"""How much host memory this process may still take, as the kernel and its control groups see it."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_bytes(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Return the bytes of host memory that can still be taken without swapping or being killed."""
    system = int(psutil.virtual_memory().available)
    return min([system, *_cgroup_headrooms(cgroup_root)])


def total_bytes(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Return the host memory of this machine, or the smallest control-group limit around this process."""
    limits = [limit for limit, _ in _cgroup_limits(cgroup_root)]
    return min([int(psutil.virtual_memory().total), *limits])


def _cgroup_headrooms(root: Path) -> list[int]:
    return [max(0, limit - used) for limit, used in _cgroup_limits(root)]


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """Return (limit, unreclaimable use) of every control group that this process is in and that has a limit."""
    found = []
    for folder in _cgroup_folders(root):
        limit = _read_int(folder / "memory.max") or _read_int(folder / "memory.limit_in_bytes")
        used = _read_int(folder / "memory.current") or _read_int(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            found.append((limit, max(0, used - _reclaimable_bytes(folder))))
    return found


def _cgroup_folders(root: Path) -> list[Path]:
    """Return the folders of this process's memory control group and of all its ancestors (v2, then v1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        leaf = base / path.lstrip("/")
        folders += [f for f in (leaf, *leaf.parents) if f.is_relative_to(base)]
    return folders


def _reclaimable_bytes(folder: Path) -> int:
    """Return the file cache of the group, which the kernel gives up before it kills anyone."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split()[:2] for line in lines)
    return int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or the word "max": no limit
        return None
