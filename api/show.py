"""What the commands print: tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from tierstep.configs.sizes import format_bytes
from tierstep.doctor import Diagnosis, DirectoryStatus
from tierstep.engine.catalog import CheckpointInfo
from tierstep.engine.planning import MemoryPlan
from tierstep.forecast import Forecast
from tierstep.progress import time_shares
from tierstep.results import TrainResult

AVERAGED_STEPS = 10


def show_result(console: Console, result: TrainResult) -> None:
    """Show where the state was, what each lane did, the drive's wear and the checkpoint."""
    console.print(_tier_table(result.plan))
    if result.losses:
        console.print(_lane_table(result))
        last = result.losses[-AVERAGED_STEPS:]
        mean = sum(last) / len(last)
        console.out(f"loss {result.losses[0]:.4f} -> {mean:.4f} (mean of the last {len(last)} steps)", highlight=False)
        console.out(f"{result.tokens_per_second:,.0f} tokens/s: {time_shares(result.times)}", highlight=False)
        console.out(
            f"drive wear: {format_bytes(round(result.bytes_written_per_step))} written a step, "
            f"{result.terabytes_written_per_day:.2f} TB a day at this pace (checkpoints apart)",
            highlight=False,
        )
    console.out(f"peak memory: {format_bytes(result.peak_rss_bytes)}", highlight=False)
    ended = f"stopped by signal {result.stopped_by}" if result.stopped_by else "done"
    console.out(f"{ended} after step {result.steps}; checkpoint: {result.checkpoint}", highlight=False)


def show_forecast(console: Console, forecast: Forecast) -> None:
    """Show what a run will take."""
    plan = forecast.plan
    console.print(_tier_table(plan))
    memory = {
        "interpreter, libraries, text": forecast.base_bytes,
        f"weights of {plan.numel:,} parameters": plan.weight_bytes,
        "gradients": forecast.gradient_bytes,
        "activations, at their peak": forecast.activation_bytes,
        "holes in the heap between those": forecast.hole_bytes,
        "state in memory (device tier on the CPU, host tier)": plan.state_bytes["device"] + plan.state_bytes["host"],
        f"{plan.slot_count} staging slots of {format_bytes(plan.slot_nbytes)}": plan.slots_bytes,
        "peak of the process": forecast.peak_rss_bytes,
        "of it pinned where there is a GPU (host tier, slots)": plan.pinned_bytes,
    }
    console.print(_table("host memory", ["what", "bytes"], [[k, format_bytes(v)] for k, v in memory.items()]))
    drive = {
        "slot files": format_bytes(plan.disk_bytes),
        "read a step, and written again": format_bytes(plan.moved_bytes_per_step),
        f"written by {forecast.steps} steps (checkpoints apart)": format_bytes(forecast.run_written_bytes),
    }
    if forecast.step is not None:
        drive["optimizer step, expected"] = f"{forecast.step.seconds:.3f} s"
        drive["optimizer step, at least"] = f"{forecast.step.limit.seconds:.3f} s ({forecast.step.limit.lane})"
        drive["wear, at most"] = f"{forecast.most_terabytes_per_day or 0:.2f} TB a day"
    console.print(_table("drive and time", ["what", "amount"], [[k, v] for k, v in drive.items()]))


def show_diagnosis(console: Console, found: Diagnosis) -> None:
    """Show what a machine has."""
    memory = found.memory
    rows = [[name, version or "not installed"] for name, version in found.versions.items()]
    rows += [[name, version or "not found"] for name, version in found.tools.items()]
    rows.append(["devices", f"{', '.join(found.devices)} ({found.cores} cores)"])
    rows.append(["native kernel", f"{_yes(found.kernel.available)}: {found.kernel.reason}"])
    rows += [[f"I/O backend {b.name}", f"{_yes(b.available)}: {b.reason}"] for b in found.backends]
    limit = "" if memory.total_bytes == memory.machine_bytes else f", {format_bytes(memory.total_bytes)} for this group"
    rows.append(
        ["memory", f"{format_bytes(memory.available_bytes)} free of {format_bytes(memory.machine_bytes)}{limit}"]
    )
    console.print(_table("machine", ["what", "found"], rows))
    columns = ["directory", "file system", "O_DIRECT", "free"]
    console.print(_table("directories", columns, [_directory_row(d) for d in found.directories]))


def show_checkpoints(console: Console, checkpoints: Sequence[CheckpointInfo]) -> None:
    """Show a directory of checkpoints, oldest save first."""
    rows = [[info.path.name, str(info.step), format_bytes(info.nbytes)] for info in checkpoints]
    console.print(_table("checkpoints", ["name", "step", "size"], rows))


def _tier_table(plan: MemoryPlan) -> Table:
    total = sum(plan.state_bytes.values()) or 1
    rows = [
        [tier, str(plan.homes.count(tier)), format_bytes(nbytes), f"{nbytes / total:.1%}"]
        for tier, nbytes in plan.state_bytes.items()
    ]
    return _table("optimizer state", ["tier", "records", "bytes", "share"], rows)


def _lane_table(result: TrainResult) -> Table:
    rows = []
    for lane, work in result.lanes.items():
        pace = f"{work.bytes / work.seconds / 1e9:.2f}" if work.seconds else "-"
        stall = f"{result.stalls[lane]:.2f}" if lane in result.stalls else "-"
        rows.append([lane, f"{work.seconds:.2f}", format_bytes(work.bytes), pace, str(work.items), stall])
    return _table("lanes", ["lane", "busy s", "bytes", "GB/s", "items", "waiting s"], rows)


def _directory_row(directory: DirectoryStatus) -> list[str]:
    probe = directory.probe
    if probe is None:
        return [str(directory.path), "-", str(directory.problem), "-"]
    direct = "yes" if probe.direct else f"no: {probe.reason}"
    return [str(directory.path), probe.filesystem, direct, format_bytes(probe.free_bytes)]


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or len(columns) == 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(text.replace("[", "\\[") for text in row))
    return table


def _yes(answer: bool) -> str:  # noqa: FBT001 - a word for it
    return "yes" if answer else "no"
