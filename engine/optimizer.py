"""`AdamW`: the torch optimizer in front of the engine."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from tierstep.configs.schema import Tiers
from tierstep.engine.accelerator import accelerator_of
from tierstep.engine.adamw.formula import Scalars, scalars
from tierstep.engine.gradients import Clip, Gradients, clip_to, collect
from tierstep.engine.hyperparameters import check_hyperparameters
from tierstep.engine.machine import division, open_compute
from tierstep.engine.overlap import WeightGates, attach_gates, require_covered
from tierstep.engine.planning import FreeBytes, MemoryPlan, measure_free, plan_memory
from tierstep.engine.shards import Shard, trainable_shards
from tierstep.engine.state_dict import StateView, load_state
from tierstep.engine.stepper import Stepper
from tierstep.engine.subgroups import ShardSpec
from tierstep.engine.timeline import Timeline
from tierstep.engine.trace import StepReport, TransferLog
from tierstep.engine.training_state import TrainingState
from tierstep.errors import ConfigError, GradientError
from tierstep.tiers.build import open_store
from tierstep.tiers.slots import SlotPool

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


class AdamW(torch.optim.Optimizer):
    """AdamW whose state lies in several tiers, with the update rule and the interface of `torch.optim.AdamW`.

    `params`, `lr`, `betas`, `eps`, `weight_decay` and `maximize` mean what they mean there. Parameters may be bf16,
    fp16 and fp32, mixed. bf16 and fp16 parameters are trained with an exact fp32 master weight (of which bf16 stores
    only the lower half); exp_avg and exp_avg_sq are always fp32. `tiers` says where the state may lie; None measures
    the free memory and plans. `foreach` and `fused` choose between torch's implementations and change nothing here.

    Construction reserves everything: it raises `ConfigError` (or `BudgetError`, with numbers) before anything is
    allocated, and `DiskFull` before the first step. Not thread-safe. Use it in a `with` block, or call `close()`, to
    give memory and files back at a known time; otherwise that happens when it is garbage collected.
    """

    _step_supports_amp_scaling = True  # GradScaler hands over grad_scale and found_inf instead of unscaling itself

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        params = _listed(params)
        if tiers is not None and not isinstance(tiers, Tiers):
            raise ConfigError(f"tiers is a {type(tiers).__name__}: pass tierstep.Tiers(...)")
        defaults: dict[str, Any] = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults |= dict(amsgrad=amsgrad, maximize=maximize, foreach=foreach, fused=fused)
        defaults |= dict(capturable=capturable, differentiable=differentiable)
        self._clip: Clip | None = None
        self._loss: Any = None
        self._opened = False
        super().__init__(params, defaults)
        self._tiers = tiers or Tiers()
        self._overlaps = self._tiers.overlap == "forward"
        self._covered: set[int] = set()  # ids of the parameters whose modules wait for them
        self._open(list(trainable_shards(self.param_groups)))
        self._opened = True

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Update every parameter that has a gradient; return what `closure` returned.

        Blocks until all weights are final and all records are stored; with `overlap="forward"` only until the numbers
        of the step are fixed, and what goes wrong later is raised by whoever waits for it first. Raises
        `GradientError` for sparse gradients, NaN and inf before anything is changed. Raises `TransferError` when a
        record cannot be read or stored; no state is lost then, and calling `step()` again, with the gradients
        untouched or cleared, finishes the step with the same bits.
        """
        self._require_open()
        if closure is not None and not self._stepper.interrupted:
            with torch.enable_grad():
                self._loss = closure()
        try:
            if not self._skipped_by_scaler():
                self._step(time.perf_counter())
        except BaseException:
            self._forget_scaler()
            raise
        self._clip = None
        loss, self._loss = self._loss, None
        return loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Have the next step scale the gradients so that their common 2-norm is at most `max_norm`.

        Returns the norm before clipping as an fp32 scalar, which is the same for any number of threads. The gradients
        themselves are not written: the factor is applied while they are read by the update. Blocks.
        """
        self._require_open()
        if not max_norm >= 0:
            raise ConfigError(f"max_norm is {max_norm}: give a number that is not negative")
        self.adopt_unfrozen()
        gradients = self._collect()
        norm = self._compute.norm(gradients, gradients.touched())
        self._clip = clip_to(gradients, norm, max_norm, self._clip)
        return torch.tensor(self._clip.norm, dtype=torch.float32)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own signature
        """Clear all gradients, and what `clip_grad_norm_` had prepared.

        A step in the background keeps its gradients; to have them overwritten (`set_to_none=False`) is waited for.
        """
        self._clip = None
        if not set_to_none and self._close.alive:
            self.synchronize()
        super().zero_grad(set_to_none)

    def attach(self, model: torch.nn.Module) -> None:
        """Have each module of `model` wait for its own weights before its forward; needed by `overlap="forward"`.

        Weights that a module takes from elsewhere than its own parameters are not waited for: call `synchronize()`
        before, as before reading weights outside a forward pass. A model compiled as a whole waits for all.
        """
        self._require_open()
        subgroups = {
            id(shard.parameter): {index for index, _ in self._state.slices_of(position)}
            for position, shard in enumerate(self._state.shards)
        }
        self._covered |= attach_gates(model, subgroups, self._stepper.enter)

    def synchronize(self) -> None:
        """Wait until all weights are final and all records are stored; raise what went wrong in the background.

        After such an error, a second call goes on with the step, to the same bits.
        """
        self._require_open()
        self._stepper.synchronize()
        self._stepper.enter(self._all_subgroups())

    # ---- parameters and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, also after steps were made; their state starts now. Raises as the constructor does."""
        if self._opened:
            self._require_open()
            self._stepper.require_whole("add parameters")
        before = len(self.param_groups)
        check_hyperparameters({**self.defaults, **param_group})
        super().add_param_group(param_group)
        if not self._opened:
            return
        try:
            self.adopt_unfrozen()
        except BaseException:
            del self.param_groups[before:]
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own AdamW layout: fp32 exp_avg and exp_avg_sq, gathered from all tiers. Blocks.

        bf16 parameters carry a third tensor, `low` (int16, the lower half of the fp32 master weight), and fp16 ones
        `master` (fp32), so that a round trip is exact; torch.optim.AdamW ignores them.
        """
        self._require_open()
        self._stepper.require_whole("read the state")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over hyperparameters and state in torch's AdamW layout, written by either library. Blocks.

        Raises `CheckpointMismatch` before anything is changed when groups, shapes or entries do not fit.
        """
        self._require_open()
        self.adopt_unfrozen()
        load_state(self, self._state, self._stepper, state_dict)
        self._clip = None

    @property
    def plan(self) -> MemoryPlan:
        """Where the state is, tier by tier, as planned when the parameters were given."""
        return self._plan

    def placement(self) -> dict[str, int]:
        """Return the bytes of state in each tier."""
        return dict(self._plan.state_bytes)

    def report(self) -> StepReport | None:
        """Return what the last finished step did; None before the first."""
        return self._stepper.report

    def trace(self) -> Timeline | None:
        """Return what every lane did in the last finished step, to be saved or drawn; None before the first."""
        return self._stepper.timeline

    def moved_bytes(self) -> dict[str, int]:
        """Return the slot-file bytes read and written since construction: {"read": …, "write": …}."""
        return self._log.moved_bytes

    @property
    def training_state(self) -> TrainingState:
        """The engine's view of shards, subgroups and records (for checkpoints and tools)."""
        return self._state

    @property
    def verifies_restored(self) -> bool:
        """Whether a restored checkpoint's records are compared with their checksums (for checkpoints)."""
        return self._tiers.verify != "off"

    @property
    def stepper(self) -> Stepper:
        """The engine's step (for checkpoints and tools)."""
        return self._stepper

    def close(self) -> None:
        """Give memory, threads and slot files back; the state is gone. May be called twice.

        Raises what went wrong in a step in the background, when everything was given back.
        """
        try:
            if self._close.alive and os.getpid() == self._process:
                _ = self._stepper.interrupted
        finally:
            self._close()

    def __enter__(self) -> AdamW:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a tierstep optimizer owns memory and files and cannot be copied or pickled: use state_dict()")

    # ---- inside

    def _open(self, shards: list[Shard]) -> None:
        """Reserve everything, or nothing."""
        self._device = shards[0].device if shards else torch.device("cpu")
        self._accelerator = accelerator_of(self._device)
        self._plan = plan_memory(_specs(shards, 0), self._tiers, self._free())
        self._log = TransferLog()
        with ExitStack() as resources:
            self._compute = open_compute(self._tiers, self._accelerator)
            resources.callback(self._compute.close)
            store = open_store(self._tiers, self._device, resources, self._log.add)
            self._state = TrainingState(store)
            self._stepper = Stepper(self._state, self._compute, WeightGates(self._accelerator), self._log)
            resources.callback(self._stepper.close)
            self._extend(shards, self._plan)
            self.state = StateView(self._state, self._stepper)  # type: ignore[assignment]
            self._close = weakref.finalize(self, _close_in, os.getpid(), resources.pop_all())
        self._process = os.getpid()

    def _all_subgroups(self) -> range:
        return range(len(self._state.subgroups))

    def _free(self) -> FreeBytes:
        return measure_free(self._tiers.nvme, None if self._accelerator is None else self._accelerator.free_bytes())

    def _extend(self, shards: list[Shard], plan: MemoryPlan) -> None:
        store = self._state.store
        if (plan.slot_count, plan.slot_nbytes) != (store.slots.count, store.slots.slot_nbytes):
            store.replace_slots(SlotPool(plan.slot_count, plan.slot_nbytes, pinned=self._device.type == "cuda"))
        self._compute.reserve(plan)
        self._stepper.division = division(plan, self._tiers)
        self._state.extend(shards, plan.subgroups, plan.homes)

    def adopt_unfrozen(self) -> None:
        """Give state to parameters that have begun to ask for gradients; `step` does that by itself.

        Raises as the constructor does. Does nothing while a step is interrupted.
        """
        known = {id(shard.parameter) for shard in self._state.shards}
        found = [shard for shard in trainable_shards(self.param_groups) if id(shard.parameter) not in known]
        if not found or self._stepper.interrupted:
            return
        names = {shard.name for shard in self._state.shards}
        for shard in found:
            if shard.name in names:
                raise ConfigError(
                    f"another parameter had the name {shard.name} before, and names identify state: give the new one "
                    f"another name, or make a new optimizer"
                )
        specs = _specs(found, len(self._state.shards))
        plan = plan_memory(specs, self._tiers, self._free(), self._plan)
        self._extend(found, plan)
        self._plan = self._plan.joined_by(plan)

    def _step(self, started: float) -> None:
        self.adopt_unfrozen()
        gradients = self._collect()
        if self._stepper.interrupted:
            self._stepper.resume(gradients, started)
        else:
            if self._overlaps:
                require_covered(self._covered, {id(shard.parameter): shard.name for shard in self._state.shards})
            factor = self._checked_factor(gradients)
            self._stepper.run(gradients, self._scalars(gradients, factor), started, background=self._overlaps)
        if not self._overlaps:
            self._stepper.enter(self._all_subgroups())
        torch.autograd.graph.increment_version([self._state.shards[i].parameter for i in gradients.touched()])

    def _collect(self) -> Gradients:
        """Collect the gradients of the parameters that are in a param group now."""
        present = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        return collect(self._state.shards, present)

    def _require_open(self) -> None:
        if not self._close.alive:
            raise ConfigError("this optimizer was closed and its state is gone: make a new one")
        if os.getpid() != self._process:
            raise ConfigError("this optimizer belongs to the process that made it: make one in the forked process")

    def _forget_scaler(self) -> None:
        """Drop what GradScaler has left for a step that failed; it sets them anew for each of its steps."""
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                delattr(self, name)

    def _skipped_by_scaler(self) -> bool:
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            return False
        self._clip = None
        return True

    def _scalars(self, gradients: Gradients, factor: float) -> list[Scalars | None]:
        """Return every shard's numbers for this step, None where it has no gradient."""
        for group in self.param_groups:
            check_hyperparameters(group)
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        touched = set(gradients.touched())
        return [
            _shard_scalars(groups[id(shard.parameter)], self._state.steps[position] + 1, factor)
            if position in touched
            else None
            for position, shard in enumerate(self._state.shards)
        ]

    def _checked_factor(self, gradients: Gradients) -> float:
        """Return what every gradient is multiplied by: the clip factor and the inverse of the loss scale.

        Raises `GradientError` for NaN and inf.
        """
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        unscale = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        if self._clip is not None and self._clip.is_of_former(gradients):
            self._clip = None
        if self._clip is None:
            self._check_finite(gradients)
            return unscale
        if self._clip.gradients.fingerprint != gradients.fingerprint:
            raise GradientError(
                "the gradients have changed since clip_grad_norm_ measured them, so its factor does not fit: "
                "call optimizer.clip_grad_norm_ last before step()"
            )
        if not self._clip.norm_is_finite:
            self._check_finite(gradients)
        return unscale * self._clip.factor

    def _check_finite(self, gradients: Gradients) -> None:
        """Raise `GradientError` that names the first parameters with NaN or inf in their gradients."""
        if self._compute.is_finite(gradients, gradients.touched()):
            return
        bad = [self._state.shards[i].name for i in gradients.touched() if not self._compute.is_finite(gradients, [i])]
        others = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise GradientError(
            f"NaN or inf in the gradient of {', '.join(bad[:3])}{others}; nothing was updated: "
            f"call zero_grad() to skip this step, and look at the loss and the learning rate"
        )


def _shard_scalars(group: Mapping[str, Any], step: int, factor: float) -> Scalars:
    return scalars(
        lr=float(group["lr"]),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
        grad_scale=factor,
        maximize=bool(group["maximize"]),
    )


def _close_in(process: int, resources: ExitStack) -> None:
    """Close what an optimizer holds; in a forked child nothing is its own, and the parent's files must stay."""
    if os.getpid() == process:
        resources.close()


def _specs(shards: list[Shard], first: int) -> list[ShardSpec]:
    return [ShardSpec(first + i, shard.numel, shard.parameter.dtype, shard.group) for i, shard in enumerate(shards)]


def _listed(params: Params) -> list[Any]:
    if not isinstance(params, Iterable):
        raise ConfigError(f"params is {params!r}: pass model.named_parameters()")
    if isinstance(params, torch.Tensor):
        raise ConfigError("params is a single tensor: pass model.parameters() or model.named_parameters()")
    listed: list[Any] = list(params)
    if not listed:
        raise ConfigError("params is empty: pass model.named_parameters() of a model that has parameters")
    return listed
