"""Every setting there is. Units are in the names; amounts of bytes are ints or text such as "64MiB"."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from tierstep.configs.section import Section
from tierstep.configs.sizes import parse_bytes
from tierstep.errors import ConfigError

OUTPUT = "{output}"  # stands for [run] output in [tiers] nvme


def _parse_path(value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{value!r} is not a path: write it as text in quotes")
    return Path(os.fspath(value)).expanduser()


def _parse_directories(value: object) -> tuple[Path, ...]:
    entries = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(entries, Iterable):
        raise ConfigError(f"{value!r} is not a list of directories: write nvme = ['/mnt/nvme0'], or leave nvme out")
    paths = tuple(_parse_path(entry) for entry in entries)
    if len(set(paths)) < len(paths):
        raise ConfigError(f"{value!r} names a directory twice: name each once")
    return paths


def _parse_betas(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
PathSetting = Annotated[Path, BeforeValidator(_parse_path)]
Directories = Annotated[tuple[Path, ...], BeforeValidator(_parse_directories)]
Verify = Literal["always", "restore", "off"]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Tiers(Section):
    """Where the optimizer's state may live, and how it is moved. Every setting has a default that works.

    `Tiers(gpu="4GiB", ram="32GiB", nvme=["/mnt/nvme0"])`. None of them changes any number that training computes.
    """

    # ---- behaviour: which memory and which drives are used

    gpu: Bytes | None = None
    """Bytes of the device's memory for records and, on a GPU, for the slots through which others pass. Default: on a
    GPU just those slots; none for a model on the CPU. 0 switches the tier off; a GPU then updates nothing."""

    ram: Bytes | None = None
    """Bytes of host memory for records and staging slots. Default: a share of what is free when training starts, as
    the control group sees it. Set it when other programs need the memory. 0 switches the tier off."""

    nvme: Directories = ()
    """Directories for records that fit nowhere else, best on different drives; they must exist. Default: none, so all
    state must fit into memory."""

    verify: Verify = "always"
    """When state that comes back from a file is compared with its checksum. Default: always, since it costs next to
    nothing beside a drive (docs/log.md) and a flipped bit, or a write that never happened, is an error that names the
    parameters instead of a bad model. "restore": when a checkpoint is restored, not between steps. "off": never; a
    checkpoint's weights and `tierstep ckpt verify` are checked all the same."""

    # ---- performance

    subgroup: Annotated[Bytes, Field(ge=1)] = 32 * 2**20
    """Bytes of state moved and updated as one. Default: 32 MiB. Smaller ones need less staging memory, larger ones
    get more out of a drive. A subgroup holds at least one element."""

    slots: Annotated[int, Field(ge=1)] | None = None
    """Staging buffers of one subgroup each, in host memory. Default: eight, or as many as `ram` has room for. More of
    them keep more cold state in memory between steps."""

    schedule: Literal["greedy", "stride", "cpu", "gpu"] = "greedy"
    """Who updates state that is not in the GPU's memory. Default: GPU and CPU, from two ends until they meet. "stride"
    gives the GPU every `stride`-th subgroup, "cpu" and "gpu" give one of them everything. For a model on the CPU it
    means nothing."""

    stride: Annotated[int, Field(ge=1)] = 2
    """With schedule = "stride": the GPU updates one subgroup in so many. Default: 2."""

    overlap: Literal["none", "forward"] = "none"
    """What goes on during the update. Default: nothing; `step()` returns when all weights are final. "forward": it
    returns at once, and each module's forward waits for its own weights; needs `optimizer.attach(model)`. Gradients
    stay in memory until they were used, also after `zero_grad()`."""

    threads: Annotated[int, Field(ge=1)] | None = None
    """Threads of the update on the CPU. Default: as many as torch uses."""

    backend: Literal["auto", "threads", "uring", "libaio"] = "auto"
    """Which I/O engine moves files. Default: what `tierstep calibrate --nvme DIR` has measured best for the
    directories, or threads without that; `tierstep doctor DIR` says which and why."""

    kernel: Literal["auto", "native", "reference"] = "auto"
    """Which code updates on the CPU. Default: the compiled kernel, or plain torch where there is none; same bits."""

    if TYPE_CHECKING:  # what callers may write; what they read back are the types above

        def __init__(
            self,
            *,
            gpu: int | str | None = None,
            ram: int | str | None = None,
            nvme: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
            verify: Verify = "always",
            subgroup: int | str = ...,
            slots: int | None = None,
            schedule: Literal["greedy", "stride", "cpu", "gpu"] = "greedy",
            stride: int = 2,
            overlap: Literal["none", "forward"] = "none",
            threads: int | None = None,
            backend: Literal["auto", "threads", "uring", "libaio"] = "auto",
            kernel: Literal["auto", "native", "reference"] = "auto",
        ) -> None: ...

    @model_validator(mode="after")
    def _has_a_tier(self) -> Tiers:
        if self.gpu == 0 and self.ram == 0 and not self.nvme:
            raise ConfigError("gpu = 0, ram = 0 and no nvme directory leave no place for state: raise one of them")
        if self.gpu == 0 and self.schedule == "gpu":
            raise ConfigError("schedule = 'gpu' with gpu = 0 leaves nobody to update state: raise gpu, or leave it out")
        return self


class Model(Section):
    """The model to train: a Llama of these sizes, or a local Hugging Face model."""

    # ---- behaviour

    path: PathSetting | None = None
    """Local Hugging Face folder or config.json, instead of the sizes below. Default: none. Nothing is downloaded."""

    hidden_size: Annotated[int, Field(ge=1)] = 320
    """Width. Default: 320."""

    num_hidden_layers: Annotated[int, Field(ge=1)] = 6
    """Depth. Default: 6."""

    num_attention_heads: Annotated[int, Field(ge=1)] = 5
    """Heads; they divide `hidden_size`. Default: 5."""

    num_key_value_heads: Annotated[int, Field(ge=1)] = 5
    """Heads of keys and values; they divide `num_attention_heads`. Default: 5. Fewer save memory at long contexts."""

    intermediate_size: Annotated[int, Field(ge=1)] = 864
    """Width of the feed-forward layers. Default: 864."""

    vocab_size: Annotated[int, Field(ge=256)] = 256
    """Number of tokens. Default: 256, one for each byte."""

    max_position: Annotated[int, Field(ge=2)] = 2048
    """Longest sequence, in tokens. Default: 2048."""

    tie_word_embeddings: bool = False
    """Whether input and output embeddings are one tensor. Default: no."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and gradients. Default: bfloat16, whose fp32 master weights the optimizer keeps."""

    # ---- performance

    activation_checkpointing: bool = False
    """Whether to compute activations again in backward instead of keeping them. Default: no. Set it when memory for
    activations is short."""

    @model_validator(mode="after")
    def _sizes_agree(self) -> Model:
        given = self.model_fields_set - {"path", "dtype", "activation_checkpointing"}
        if self.path is not None and given:
            raise ConfigError(f"path = '{self.path}' brings its own {', '.join(sorted(given))}: leave those keys out")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ConfigError(
                f"hidden_size = {self.hidden_size} is no multiple of 2 x num_attention_heads = "
                f"2 x {self.num_attention_heads}: make it one (rotary positions need heads of even width)"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads = {self.num_key_value_heads} does not divide num_attention_heads = "
                f"{self.num_attention_heads}: choose a divisor"
            )
        return self


class Data(Section):
    """The text to train on, read as bytes: one token each."""

    # ---- behaviour

    path: PathSetting = Path("stdlib")
    """A text file, a folder of text files, or "stdlib". Default: "stdlib", the sources and texts of this Python
    interpreter's own standard library, which every machine has. A folder of that name is meant by its full path."""

    max_bytes: Bytes = 16 * 2**20
    """Text beyond this is left out. Default: 16 MiB."""

    sequence_length: Annotated[int, Field(ge=2)] = 256
    """Tokens of a sequence. Default: 256."""

    batch_size: Annotated[int, Field(ge=1)] = 4
    """Sequences of a micro-batch, one forward and backward pass. Default: 4."""


class Optimizer(Section):
    """AdamW, and how its learning rate goes."""

    # ---- behaviour

    lr: Annotated[float, Field(ge=0)] = 3e-4
    """Peak learning rate. Default: 3e-4. Small models stand, and want, more."""

    betas: Annotated[tuple[Fraction, Fraction], BeforeValidator(_parse_betas)] = (0.9, 0.95)
    """Decay of the first and second moment. Default: 0.9, 0.95."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator. Default: 1e-8."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices; vectors (norms, biases) have none. Default: 0.1."""

    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of all gradients together; larger ones are scaled down. Default: 1. 0 switches clipping off."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises linearly to `lr`. Default: 0."""

    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate falls after the warm-up. Default: not at all."""

    decay_steps: Annotated[int, Field(ge=1)] | None = None
    """The step at which a cosine or linear schedule ends. It has no default, so that changing the number of steps to
    run changes no number."""

    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """What is left of `lr` when the schedule ends. Default: a tenth."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> Optimizer:
        if self.schedule != "constant" and (self.decay_steps is None or self.decay_steps <= self.warmup_steps):
            raise ConfigError(
                f"decay_steps = {self.decay_steps}: the {self.schedule} schedule needs the step at which it ends, "
                f"after the {self.warmup_steps} of warmup_steps"
            )
        return self

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.schedule == "constant" or self.decay_steps is None:
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.final_lr_fraction + (1 - self.final_lr_fraction) * left)


class Run(Section):
    """How long a run goes on, and what it leaves behind."""

    # ---- behaviour

    output: PathSetting = Path("runs/default")
    """Folder of the run, made when needed: checkpoints, losses, scratch files. Default: runs/default."""

    steps: Annotated[int, Field(ge=1)] = 100
    """Train up to this step. Default: 100."""

    accumulation_steps: Annotated[int, Field(ge=1)] = 1
    """Micro-batches whose gradients are summed for one step. Default: 1. Raise it for larger batches than memory
    has room for."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Start of all randomness: initial weights and the choice of text. Default: 0."""

    checkpoint_every_steps: Annotated[int, Field(ge=0)] = 50
    """Save after every so many steps, and always at the end. Default: 50. 0 saves at the end only."""

    keep: Annotated[int, Field(ge=1)] = 3
    """How many of the newest checkpoints stay. Default: 3."""

    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Checkpoints of steps that are multiples of it stay too. Default: none."""

    # ---- performance

    threads: Annotated[int, Field(ge=1)] | None = None
    """Threads of forward and backward. Default: torch's own choice; a resumed run takes its first part's, since
    the order of sums, and so the last bits, depend on it."""


class TrainConfig(Section):
    """A training run, as a TOML file describes it: one table for each field."""

    model: Model = Model()
    """What is trained."""

    data: Data = Data()
    """On which text."""

    optimizer: Optimizer = Optimizer()
    """By which rule."""

    tiers: Tiers = Tiers()
    """Where its state lives. In `nvme`, "{output}" stands for the run's output folder."""

    run: Run = Run()
    """How long, and where to."""

    @model_validator(mode="after")
    def _sequences_fit(self) -> TrainConfig:
        if self.model.path is None and self.data.sequence_length > self.model.max_position:
            raise ConfigError(
                f"[data] sequence_length = {self.data.sequence_length} is more than [model] max_position = "
                f"{self.model.max_position}: lower the one or raise the other"
            )
        return self

    @property
    def resolved_tiers(self) -> Tiers:
        """The tiers with "{output}" replaced."""
        output = str(self.run.output)
        nvme = tuple(Path(str(path).replace(OUTPUT, output)) for path in self.tiers.nvme)
        return self.tiers.model_copy(update={"nvme": nvme})
