"""What a training run will take, before anything of it runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tierstep.configs.schema import TrainConfig
from tierstep.data import open_data
from tierstep.engine.performance import MachineRates
from tierstep.engine.planning import MemoryPlan, measure_free, plan_memory
from tierstep.engine.prediction import Expectation, expect_step
from tierstep.engine.rates import measure_rates
from tierstep.engine.subgroups import ShardSpec
from tierstep.models import DTYPES, outline_model
from tierstep.process_memory import resident_bytes
from tierstep.run_folder import tiers_before_a_run
from tierstep.train import param_groups

SECONDS_PER_DAY = 86400

# Blocks that glibc's heap cuts to torch's alignment fit no later request of the same size when they are freed, and stay
# as holes between those in use. Live tensors took 1.3 to 1.5 times their bytes in runs of 8 and 35 M parameters (and
# 1.0 times with MALLOC_MMAP_THRESHOLD_=65536, which costs page faults instead).
HEAP_HOLES = 0.4


@dataclass(frozen=True)
class Forecast:
    """Bytes that a run will take, and what its steps will move.

    plan               where the state will be
    base_bytes         this interpreter with torch and transformers loaded, and the text
    gradient_bytes     gradients of all weights
    activation_bytes   the most that forward and backward hold beside weights and gradients
    steps              steps of the whole run
    rates              measured speeds of this machine, or None
    """

    plan: MemoryPlan
    base_bytes: int
    gradient_bytes: int
    activation_bytes: int
    steps: int
    rates: MachineRates | None

    @property
    def hole_bytes(self) -> int:
        """Memory that the allocator cannot reuse between gradients and activations."""
        return int(HEAP_HOLES * (self.gradient_bytes + self.activation_bytes))

    @property
    def peak_rss_bytes(self) -> int:
        """Estimate of the most memory that the process will have resident."""
        model = self.plan.weight_bytes + self.gradient_bytes + self.activation_bytes
        return self.base_bytes + model + self.hole_bytes + self.plan.optimizer_host_bytes

    @cached_property
    def step(self) -> Expectation | None:
        """What an optimizer step is expected to take, None where rates were not measured."""
        return None if self.rates is None else expect_step(self.plan, self.rates, division=None)

    @property
    def run_written_bytes(self) -> int:
        """File bytes that all steps together write, checkpoints apart."""
        return self.steps * self.plan.moved_bytes_per_step

    @property
    def most_terabytes_per_day(self) -> float | None:
        """Drive wear if forward and backward took no time; None where rates were not measured."""
        if self.step is None or not self.step.limit.seconds:
            return None
        return self.plan.moved_bytes_per_step / self.step.limit.seconds * SECONDS_PER_DAY / 1e12


def forecast(config: TrainConfig, *, measure: bool) -> Forecast:
    """Work out what `train(config)` will take. Blocks; takes no memory for the model, and leaves no file behind.

    `measure` also measures this machine's rates, which takes a few seconds, memory of a few hundred MB and a temporary
    file in each nvme directory. Raises `ConfigError`, and `BudgetError` with the numbers.
    """
    tiers = tiers_before_a_run(config)
    text_bytes = open_data(config.data, config.run.seed).text_bytes
    _touch_libraries(DTYPES[config.model.dtype])
    with FakeTensorMode():
        model = outline_model(config)
        groups = param_groups(model, config.optimizer.weight_decay)
        plan = plan_memory(_specs(groups), tiers, measure_free(tiers.nvme))
        base = resident_bytes() + text_bytes
        most_live = _most_live_bytes(model, config)
    return Forecast(
        plan=plan,
        base_bytes=base,
        gradient_bytes=plan.weight_bytes,
        activation_bytes=max(0, most_live - plan.weight_bytes),
        steps=config.run.steps,
        rates=measure_rates(tiers) if measure else None,
    )


def _touch_libraries(dtype: torch.dtype) -> None:
    """Train a few real numbers, so that code and work space of the mathematical libraries are resident as in a run."""
    inputs = torch.ones(1, 4, 64, 64, dtype=dtype)
    layer = torch.nn.Linear(64, 64, dtype=dtype)
    outputs = torch.nn.functional.scaled_dot_product_attention(layer(inputs), inputs, inputs, is_causal=True)
    torch.nn.functional.silu(outputs).float().logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]


def _specs(groups: Sequence[Mapping[str, Any]]) -> list[ShardSpec]:
    parameters = [(parameter, index) for index, group in enumerate(groups) for _, parameter in group["params"]]
    return [ShardSpec(i, p.numel(), p.dtype, group) for i, (p, group) in enumerate(parameters)]


def _most_live_bytes(model: torch.nn.Module, config: TrainConfig) -> int:
    """Return the most bytes of tensors, the model's own apart, that a step holds; gradients are among them.

    Runs forward and backward on tensors that have shapes but no memory, so it sees what this model really keeps.
    """
    tokens = torch.zeros(config.data.batch_size, config.data.sequence_length, dtype=torch.int64)
    with _LiveBytes([*model.parameters(), *model.buffers()]) as live:
        for _ in range(min(2, config.run.accumulation_steps)):  # the second pass finds gradients there
            model(input_ids=tokens, labels=tokens).loss.backward()
    return int(live.most)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operation, and counts the bytes of the storages that it made and that are still referenced."""

    def __init__(self, left_out: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most: int = 0
        self._now: int = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in left_out)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, nbytes: int) -> None:
        self._now -= nbytes
