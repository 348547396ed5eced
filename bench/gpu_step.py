"""Training iterations on one GPU: tierstep beside DeepSpeed, torchao and a loop with everything on the GPU.

    python -m tierstep.bench.gpu_step --model 2.7b --contestants torch tierstep tierstep:schedule=cpu deepspeed

Every contestant runs in a process of its own, one after the other, on the same random tokens. Its phases (forward,
backward, step) are timed with the device synchronised between them, and then whole iterations without, as training
runs. A contestant that fails or takes longer than --timeout is reported as such; the others still run. The last line is
one JSON object with all raw samples; bench/results/ keeps it under --name.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from tierstep.bench.contestants import median
from tierstep.bench.gpu_contestants import Contestant, Setting, build
from tierstep.bench.provenance import RESULTS, publish

WARM_UP = 2


def main() -> None:
    """Run the benchmark, or one contestant of it."""
    options = _options()
    if options.one:
        print(json.dumps(_measure(options)))
        return
    results = {name: _run_alone(name, options) for name in options.contestants}
    for name, found in results.items():
        print(_row(name, found))
    setting = {key: getattr(options, key) for key in ("model", "batch", "length", "accumulation", "clip", "steps")}
    publish(options.name, {"setting": setting, "contestants": results}, folder=options.folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="training iterations on one GPU compared")
    parser.add_argument("--model", default="2.7b")
    parser.add_argument("--contestants", nargs="+", default=["torch", "tierstep", "torchao", "deepspeed"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--name", default="gpu_step")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--timelines", type=Path, help="a folder for each contestant's last step, if it can be drawn")
    return parser.parse_args()


def _run_alone(name: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "tierstep.bench.gpu_step", "--one", name, "--device", options.device]
    for key in ("model", "batch", "length", "accumulation", "clip", "steps"):
        command += [f"--{key}", str(getattr(options, key))]
    if options.timelines:
        command += ["--timelines", str(options.timelines)]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {options.timeout:.0f} s"}
    found: dict[str, Any] = {"error": "\n".join(done.stderr.splitlines()[-12:])}
    if done.returncode == 0:
        found = json.loads(done.stdout.splitlines()[-1])
    found["whole_seconds"] = time.perf_counter() - start
    print(_row(name, found), flush=True)
    return found


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    setting = Setting(options.model, options.batch, options.length, options.accumulation, options.clip, options.device)
    start = time.perf_counter()
    contestant = build(options.one, setting)
    _synchronize(setting)
    built = time.perf_counter() - start
    phases = [_phases(contestant, setting) for _ in range(WARM_UP + options.steps)][WARM_UP:]
    iterations = _iterations(contestant, setting, options.steps)
    description = contestant.describe()
    if options.timelines:
        contestant.save_timeline(options.timelines / re.sub(r"\W+", "-", options.one))
    return {
        "parameters": contestant.parameters,
        "start_seconds": built,
        "forward": [forward for forward, _, _ in phases],
        "backward": [backward for _, backward, _ in phases],
        "step": [step for _, _, step in phases],
        "iteration": iterations,
        "gpu_peak_bytes": torch.cuda.max_memory_allocated() if setting.device == "cuda" else None,
        "resident_bytes": psutil.Process().memory_info().rss,
        **description,
    }


def _phases(contestant: Contestant, setting: Setting) -> tuple[float, float, float]:
    """Return the seconds of forward and backward, summed over micro-batches, and of the step."""
    forward = backward = 0.0
    for _ in range(setting.accumulation):
        start = time.perf_counter()
        loss = contestant.forward()
        _synchronize(setting)
        middle = time.perf_counter()
        contestant.backward(loss)
        _synchronize(setting)
        forward, backward = forward + middle - start, backward + time.perf_counter() - middle
    start = time.perf_counter()
    contestant.step()
    _synchronize(setting)
    return forward, backward, time.perf_counter() - start


def _iterations(contestant: Contestant, setting: Setting, count: int) -> list[float]:
    """Return the seconds of whole iterations, in which nobody waits for the device but who has to."""
    times = []
    for _ in range(count + 1):
        times.append(time.perf_counter())
        for _ in range(setting.accumulation):
            contestant.backward(contestant.forward())
        contestant.step()
    _synchronize(setting)
    times.append(time.perf_counter())
    return [later - earlier for earlier, later in zip(times[1:], times[2:], strict=False)]


def _synchronize(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def _row(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{name:40} failed: {found['error'][-900:]}"
    step, whole = median(found["step"]), median(found["iteration"])
    return (
        f"{name:40} forward {median(found['forward']):.3f} backward {median(found['backward']):.3f} step {step:.3f} "
        f"iteration {whole:.3f} s, {found['parameters'] / step / 1e6:,.0f} M params/s, "
        f"GPU {(found['gpu_peak_bytes'] or 0) / 2**30:.1f} GiB, started in {found['start_seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
