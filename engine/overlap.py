"""Training that goes on while a step does: who has to wait for which weights, and only for those."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from tierstep.engine.accelerator import Accelerator, Mark
from tierstep.errors import ConfigError


class WeightGates:
    """Which subgroups' weights are not final yet. Any thread may call.

    Thread A (a lane) publishes a subgroup when nothing but its stream's work is left to do; thread B (the training
    loop) waits for that, and has its own stream wait for the rest.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._closed: set[int] = set()
        self._marks: dict[int, Mark] = {}
        self._failed = False
        self._changed = threading.Condition()

    def close(self, subgroups: Iterable[int]) -> None:
        """Have everyone wait for these from now on: a step begins."""
        with self._changed:
            self._closed, self._failed = set(subgroups), False
            self._marks.clear()

    def publish(self, subgroup: int, mark: Mark | None) -> None:
        """Let those pass who wait for this subgroup; its weights are final when `mark` is reached, or now."""
        with self._changed:
            if subgroup not in self._closed:
                return
            self._closed.discard(subgroup)
            if mark is not None:
                self._marks[subgroup] = mark
            self._changed.notify_all()

    def fail(self) -> None:
        """Let everyone pass: the step failed, and who comes through has to ask why."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait(self, subgroups: Collection[int]) -> bool:
        """Block until these weights are as good as final for the calling thread's stream; False if the step failed."""
        if not self._closed and not self._marks:
            return not self._failed
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._closed.isdisjoint(subgroups))
            marks = [self._marks[index] for index in subgroups if index in self._marks]
            if self._failed:
                return False
        if self._accelerator is not None:
            stream = self._accelerator.caller()
            for mark in marks:
                stream.after(mark)
        return True


def attach_gates(
    model: torch.nn.Module, subgroups_of: Mapping[int, Collection[int]], enter: Callable[[Collection[int]], None]
) -> set[int]:
    """Have each module's forward call `enter` with the subgroups of its own parameters; return the covered parameters.

    `subgroups_of` is by the parameters' ids. A compiled model waits for all of its parameters before it begins.
    """
    covered: set[int] = set()
    compiled = isinstance(model, torch._dynamo.OptimizedModule)
    for module in [model] if compiled else model.modules():
        own = [id(parameter) for parameter in module.parameters(recurse=compiled) if id(parameter) in subgroups_of]
        covered.update(own)
        wanted = sorted({index for parameter in own for index in subgroups_of[parameter]})
        if wanted:
            module.register_forward_pre_hook(_hook(wanted, enter))
    return covered


def require_covered(covered: Collection[int], names: Mapping[int, str]) -> None:
    """Raise `ConfigError` for parameters whose modules do not wait for them."""
    missing = [name for parameter, name in names.items() if parameter not in covered]
    if missing:
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"overlap = 'forward' needs to know the modules of {', '.join(missing[:3])}{others}: call "
            f"optimizer.attach(model) before the first step, or use overlap = 'none'"
        )


def _hook(wanted: list[int], enter: Callable[[Collection[int]], None]) -> Callable[[torch.nn.Module, Any], None]:
    def wait(module: torch.nn.Module, inputs: Any) -> None:  # noqa: ANN401 - torch's own signature
        enter(wanted)

    uncompiled: Callable[[torch.nn.Module, Any], None] = torch.compiler.disable(wait)  # type: ignore[no-untyped-call]
    return uncompiled
