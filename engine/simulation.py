"""A step played through without doing it: the lanes of the pipeline, on a machine that only has rates. Pure.

Everything that is under way at the same time shares what it uses: transfers share their direction of the link, both
updating lanes of a machine without a GPU share its cores, reads and writes share the drives, and whatever touches host
memory is slowed down alike when all together ask for more than it gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tierstep.engine.performance import Load, MachineRates
from tierstep.engine.plan import StepPlan

RESOURCES = {"weights_in": "h2d", "weights_out": "d2h", "read": "files", "write": "files"}  # others are their own
LANES = {"weights_in": "h2d", "weights_out": "d2h"}  # whose work that counts as
AT_ONCE = ("read", "write")  # not one after the other
NOTHING = 1e-9  # bytes


@dataclass(frozen=True)
class Passage:
    """How many subgroups may be on their way: slots on the GPU, staging buffers for the CPU, slots in host memory."""

    device_slots: int = 1
    staging: int = 1
    slots: int = 0


@dataclass(frozen=True)
class Prediction:
    """How long the lanes of a step take, when each of them works, and how many subgroups which of them updates."""

    seconds: float
    busy_seconds: Mapping[str, float]
    updated: Mapping[str, int]


@dataclass
class _Job:
    channel: str
    left: float
    traffic: float  # of host memory, for each byte of the job
    then: Callable[[], None]


@dataclass
class _Machine:
    """Works off jobs: one at a time in each channel, in order, but for reads and writes."""

    rates: MachineRates
    now: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    channels: dict[str, deque[_Job]] = field(default_factory=dict)

    def submit(self, channel: str, nbytes: float, traffic: float, then: Callable[[], None]) -> None:
        self.channels.setdefault(channel, deque()).append(_Job(channel, max(nbytes, NOTHING), traffic, then))

    def run(self) -> None:
        while active := self._active():
            speeds = self._speeds(active)
            seconds = min(job.left / speed for job, speed in zip(active, speeds, strict=True))
            self.now += seconds
            for lane in {LANES.get(job.channel, job.channel) for job in active}:
                self.busy[lane] = self.busy.get(lane, 0.0) + seconds
            for job, speed in zip(active, speeds, strict=True):
                job.left -= seconds * speed
            for job in [job for job in active if job.left <= NOTHING]:
                self.channels[job.channel].remove(job)
                job.then()

    def _active(self) -> list[_Job]:
        return [
            job for name, jobs in self.channels.items() for job in (list(jobs) if name in AT_ONCE else list(jobs)[:1])
        ]

    def _speeds(self, active: Sequence[_Job]) -> list[float]:
        resources = [self._resource(job.channel) for job in active]
        speeds = [self._rate(name, resources) / resources.count(name) for name in resources]
        wanted = sum(speed * job.traffic for job, speed in zip(active, speeds, strict=True))
        slowed = min(1.0, self.rates.memory / wanted) if wanted else 1.0
        return [speed * (slowed if job.traffic else 1.0) for job, speed in zip(active, speeds, strict=True)]

    def _resource(self, channel: str) -> str:
        name = RESOURCES.get(channel, channel)
        return "cpu" if self.rates.gpu is None and name == "gpu" else name

    def _rate(self, resource: str, present: Collection[str]) -> float:
        gpu = self.rates.gpu
        if resource == "files":
            return self.rates.files or float("inf")
        if gpu is None or resource == "cpu":
            return self.rates.update
        if resource == "gpu":
            return gpu.update
        if "h2d" in present and "d2h" in present:
            return gpu.both
        return gpu.h2d if resource == "h2d" else gpu.d2h


class _Step:
    """The pipeline's rules: who takes what when."""

    def __init__(
        self, plan: StepPlan, loads: Sequence[Load], machine: _Machine, passage: Passage, resident: Collection[int]
    ) -> None:
        self._plan, self._loads, self._machine = plan, loads, machine
        self._warm, self._to_read, self._arrived = deque(plan.warm), deque(plan.cold), deque[int]()
        self._resident = set(resident)
        self._free_slots = passage.slots - len(self._resident)
        on_gpu = machine.rates.gpu is not None
        self._depth = {"gpu": passage.device_slots if on_gpu else 1, "cpu": passage.staging if on_gpu else 1}
        self._under_way = dict.fromkeys(self._depth, 0)
        self.updated = dict.fromkeys(self._depth, 0)

    def go_on(self) -> None:
        """Start whatever can start."""
        while self._to_read and (self._to_read[0] in self._resident or self._free_slots > 0):
            self._read(self._to_read.popleft())
        progress = True
        while progress:
            progress = False
            for lane in self._depth:
                if self._under_way[lane] < self._depth[lane] and (task := self._take(lane)) is not None:
                    self._under_way[lane] += 1
                    self._start(lane, task)
                    progress = True

    def _read(self, subgroup: int) -> None:
        def arrived() -> None:
            self._arrived.append(subgroup)
            self.go_on()

        if subgroup in self._resident:
            self._arrived.append(subgroup)
            return
        self._free_slots -= 1
        self._machine.submit("read", self._loads[subgroup].record, 1, arrived)

    def _take(self, lane: str) -> int | None:
        for waiting, front in ((self._arrived, True), (self._warm, lane == "gpu")):
            for subgroup in waiting if front else reversed(waiting):
                if self._plan.bound.get(subgroup, lane) == lane:
                    waiting.remove(subgroup)
                    return subgroup
        return None

    def _start(self, lane: str, subgroup: int) -> None:
        load, submit = self._loads[subgroup], self._machine.submit

        def ended() -> None:
            self._end(lane, subgroup)

        def update(then: Callable[[], None]) -> Callable[[], None]:
            on_gpu = lane == "gpu" and self._machine.rates.gpu is not None
            return lambda: submit(lane, load.kernel, 0 if on_gpu else 1, then)

        if self._machine.rates.gpu is None or load.home == "device":
            update(ended)()
        elif lane == "gpu":
            submit("h2d", load.record, 1, update(lambda: submit("d2h", load.record, 1, ended)))
        else:
            emptied = update(lambda: submit("weights_in", load.weights, 1, ended))
            submit("weights_out", load.weights + load.gradients, 1, emptied)

    def _end(self, lane: str, subgroup: int) -> None:
        self._under_way[lane] -= 1
        self.updated[lane] += 1
        if self._loads[subgroup].home == "nvme" and subgroup not in self._plan.keep:
            self._machine.submit("write", self._loads[subgroup].record, 1, self._written)
        self.go_on()

    def _written(self) -> None:
        self._free_slots += 1
        self.go_on()


def simulate(
    plan: StepPlan, loads: Sequence[Load], rates: MachineRates, passage: Passage, resident: Collection[int] = ()
) -> Prediction:
    """Play a step through; `loads` are those of all subgroups, `resident` the cold ones that are in slots already."""
    machine = _Machine(rates)
    step = _Step(plan, loads, machine, passage, resident)
    step.go_on()
    machine.run()
    return Prediction(machine.now, machine.busy, step.updated)
