"""What a reader needs to judge a number: hardware, versions, commit, date. And where results are kept."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tierstep.tiers.memory import total_bytes
from tierstep.version import __version__

RESULTS = Path(__file__).parent / "results"


def provenance() -> dict[str, Any]:
    """Return hardware, versions, commit, date and command, without names of hosts or paths."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([f"python -m tierstep.bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": total_bytes(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": platform.release().split("-")[0],
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "tierstep": __version__,
    }


def publish(name: str, result: dict[str, Any], *, folder: Path | None = RESULTS) -> None:
    """Keep a result in `folder` and print it as the last line, one JSON object."""
    result = {"benchmark": name, "provenance": provenance(), **result}
    if folder is not None:
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def _commit() -> str | None:
    """Return the commit of the sources, with a mark when they were changed since; None outside a checkout."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or None


def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo") or "")
    return found.group(1).strip() if found else platform.machine()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
