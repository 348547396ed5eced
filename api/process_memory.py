"""What this process takes of the machine's memory, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return the bytes that are resident now."""
    return _read("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most bytes that were ever resident. (`getrusage` would count the parent before its exec, too.)"""
    return _read("VmHWM")


def _read(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024
