"""Which drive a directory is on, in words that stay the same from one run to the next."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """What is mounted where: "ext4", "/dev/nvme0n1p1", "/mnt/nvme0"; "unknown" when the system does not tell."""

    filesystem: str = "unknown"
    source: str = "unknown"
    point: str = "unknown"


def find_mount(path: Path, mounts: str | None = None) -> Mount:
    """Return the mount that holds `path`, from the text of /proc/self/mountinfo."""
    try:
        lines = (MOUNTS.read_text() if mounts is None else mounts).splitlines()
    except OSError:
        return Mount()
    resolved, best, found = path.resolve(), -1, Mount()
    for line in lines:
        before, _, after = line.partition(" - ")
        point, (filesystem, source) = Path(_unescape(before.split()[4])), after.split()[:2]
        # Of equal mount points the last one counts: it was mounted over the others.
        if resolved.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), Mount(filesystem, _unescape(source), str(point))
    return found


def drives_of(directories: Sequence[Path]) -> str:
    """Return the drives of directories as one line: file system, device, mount point and size of each, and the cores.

    Directories of one file system count once, and their order does not matter. Another machine, or another drive in
    the same place, has another line.
    """
    drives = {_drive(directory) for directory in directories}
    return "; ".join([*sorted(drives), f"{os.cpu_count()} cores"])


def _drive(directory: Path) -> str:
    mount, status = find_mount(directory), os.statvfs(directory)
    return f"{mount.filesystem} on {mount.source} at {mount.point}, {status.f_blocks * status.f_frsize} bytes"


def _unescape(name: str) -> str:
    """Undo mountinfo's octal escapes of space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
