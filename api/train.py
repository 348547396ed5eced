"""A plain training loop around `tierstep.AdamW`: the reference for anybody's own."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from tierstep.configs.schema import TrainConfig
from tierstep.data import TextData, open_data
from tierstep.engine.catalog import CheckpointInfo
from tierstep.engine.optimizer import AdamW
from tierstep.engine.signal_flag import SignalFlag
from tierstep.engine.timeline import Event, Timeline
from tierstep.engine.trace import StepReport
from tierstep.identity import RunIdentity, identify, read_identity, require_same
from tierstep.losses import LossLog
from tierstep.models import build_model
from tierstep.observer import Observer, RunStart, Silent, StepEvent, StepTimes
from tierstep.process_memory import peak_resident_bytes
from tierstep.results import Totals, TrainResult
from tierstep.run_folder import RunFolder


@dataclass(frozen=True)
class Run:
    """Everything that a training run holds while it goes on."""

    config: TrainConfig
    folder: RunFolder
    identity: RunIdentity
    data: TextData
    model: torch.nn.Module
    optimizer: AdamW
    observer: Observer

    def save(self, step: int, losses: LossLog) -> Path:
        """Make the losses durable, then save everything. Blocks."""
        losses.sync()
        pending = self.folder.checkpoints.save(
            step, model=self.model, optimizer=self.optimizer, extra=self.identity.as_extra()
        )
        return pending.wait()


def train(
    config: TrainConfig, *, resume: bool = False, fresh: bool = False, observer: Observer | None = None
) -> TrainResult:
    """Train as `config` says, and save into its output folder. Blocks until the end.

    `resume` continues the newest checkpoint there, and begins anew where there is none; the losses are those of a run
    that was never interrupted, bit for bit, also with other tiers. `fresh` first renames what is there to
    "<output>.old-N". SIGINT and SIGTERM (in the main thread) end the run after the step under way, with a checkpoint.
    Sets torch's number of threads while it runs.

    Raises `ConfigError` before anything is changed: a setting is wrong, the folder has a run and neither flag was
    given, or a setting that decides numbers differs from the resumed run's. A `TransferError` in a step leaves the
    checkpoints as they were.
    """
    folder = RunFolder(config)
    origin = folder.continued(resume=resume, fresh=fresh)
    data = open_data(config.data, config.run.seed)
    identity = _identity(config, data, origin)
    with ExitStack() as resources:
        resources.enter_context(_torch_threads(identity.threads))
        model = build_model(config)
        resources.enter_context(folder.opened(fresh=fresh))
        optimizer = resources.enter_context(_optimizer(model, config))
        run = Run(config, folder, identity, data, model, optimizer, observer or Silent())
        step = 0 if origin is None else _restore(run, origin)
        run.observer.on_start(_start(run, step, origin, resume=resume))
        result = _train(run, step)
    run.observer.on_end(result)
    return result


def param_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the model's trainable parameters with their names in two groups: matrices, which decay, and the rest."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in named if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def forward_backward(model: torch.nn.Module, data: TextData, step: int, micro_steps: int) -> tuple[float, list[Event]]:
    """Add the gradients of a step's micro-batches up; return their mean loss, and when each pass began and ended."""
    total, passes = 0.0, []
    for micro_step in range(micro_steps):
        tokens = data.batch(step, micro_step)
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss / micro_steps
        middle = time.perf_counter()
        loss.backward()
        total += loss.item()
        passes.append(Event("forward", micro_step, start, middle, 0))
        passes.append(Event("backward", micro_step, middle, time.perf_counter(), 0))
    return total, passes


def _train(run: Run, done: int) -> TrainResult:
    settings, totals, first_step = run.config.run, Totals(), done + 1
    with LossLog(run.folder.losses, keep_through=done) as losses, _stop_signals() as stop:
        stopping = False
        while done < settings.steps and not stopping:
            event = _step(run, done + 1)
            done = event.step
            losses.add(done, event.loss)
            stopping = stop.received is not None  # asked once, so that a run that ends here has saved here
            if stopping or done == settings.steps or _is_multiple(done, settings.checkpoint_every_steps):
                event = _saved(run, event, losses)
            totals.add(event)
            run.observer.on_step(event)
        stopped_by = stop.received if done < settings.steps else None
    return _result(run, totals, first_step, done, stopped_by)


def _step(run: Run, step: int) -> StepEvent:
    """Make one step: what every training loop does, with a clock beside it."""
    settings, optimizer = run.config, run.optimizer
    start = time.perf_counter()
    lr = settings.optimizer.lr_at(step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss, passes = forward_backward(run.model, run.data, step, settings.run.accumulation_steps)
    middle = time.perf_counter()
    norm = optimizer.clip_grad_norm_(settings.optimizer.clip_norm).item() if settings.optimizer.clip_norm else None
    optimizer.step()
    optimizer.zero_grad()
    update = time.perf_counter() - middle
    report = cast(StepReport, optimizer.report())  # a step was just made
    timeline = cast(Timeline, optimizer.trace()).joined_by(passes)
    stall = max(report.stall_seconds.values())  # the lanes wait side by side
    times = StepTimes(middle - start, update - stall, stall)
    return StepEvent(step, loss, lr, norm, _tokens_per_step(settings), times, report, timeline, checkpoint=None)


def _saved(run: Run, event: StepEvent, losses: LossLog) -> StepEvent:
    """Save after a step; return its event with the checkpoint and the time that it took."""
    start = time.perf_counter()
    checkpoint = run.save(event.step, losses)
    return replace(event, checkpoint=checkpoint, times=replace(event.times, save=time.perf_counter() - start))


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _tokens_per_step(config: TrainConfig) -> int:
    return config.data.batch_size * config.data.sequence_length * config.run.accumulation_steps


def _identity(config: TrainConfig, data: TextData, origin: CheckpointInfo | None) -> RunIdentity:
    """Return what decides the run's numbers; a resumed run keeps the one it began with, or is refused."""
    present = identify(config, data)
    if origin is None:
        return present
    saved = read_identity(origin.path)
    require_same(saved, present, config, origin.path)
    return saved


def _optimizer(model: torch.nn.Module, config: TrainConfig) -> AdamW:
    rule = config.optimizer
    groups = param_groups(model, rule.weight_decay)
    return AdamW(groups, lr=rule.lr_at(1), betas=rule.betas, eps=rule.eps, tiers=config.resolved_tiers)


def _restore(run: Run, origin: CheckpointInfo) -> int:
    """Take over a checkpoint; return the number of steps that were made."""
    run.folder.checkpoints.restore(model=run.model, optimizer=run.optimizer, path=origin.path)
    return origin.step


def _start(run: Run, done: int, origin: CheckpointInfo | None, *, resume: bool) -> RunStart:
    notices = run.identity.notices()
    if resume and origin is None:
        notices += (f"there is no checkpoint in {run.folder.checkpoints.directory}: starting from scratch",)
    return RunStart(
        first_step=done + 1,
        last_step=run.config.run.steps,
        parameters=run.optimizer.plan.numel,
        plan=run.optimizer.plan,
        resumed_from=None if origin is None else origin.path,
        notices=notices,
    )


def _result(run: Run, totals: Totals, first_step: int, done: int, stopped_by: int | None) -> TrainResult:
    return TrainResult(
        first_step=first_step,
        steps=done,
        losses=tuple(totals.losses),
        checkpoint=run.folder.checkpoints.list()[-1].path,
        stopped_by=stopped_by,
        plan=run.optimizer.plan,
        report=totals.report,
        lanes=totals.lanes,
        stalls=totals.stalls,
        times=totals.times,
        tokens=totals.tokens,
        moved_bytes=run.optimizer.moved_bytes(),
        peak_rss_bytes=peak_resident_bytes(),
    )


@contextmanager
def _stop_signals() -> Iterator[SignalFlag]:
    """Note SIGINT and SIGTERM, where this thread may."""
    stop = SignalFlag(signal.SIGINT, signal.SIGTERM)
    with stop if threading.current_thread() is threading.main_thread() else nullcontext():
        yield stop


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
