"""A training run of a second: a tiny Llama whose state lies on all three tiers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tierstep.configs.load import load_config
from tierstep.configs.schema import TrainConfig

TOML = """
[model]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
intermediate_size = 64
max_position = 32
[data]
path = "{text}"
sequence_length = 32
batch_size = 2
[optimizer]
lr = 1e-2
warmup_steps = 2
schedule = "cosine"
decay_steps = 12
[tiers]
gpu = "80KiB"
ram = "200KiB"
nvme = ["{{output}}/nvme"]
subgroup = "20KiB"
[run]
output = "{output}"
steps = 8
checkpoint_every_steps = 3
accumulation_steps = 2
threads = 1
"""


def write_config(folder: Path) -> Path:
    """Write a text and a configuration that trains on it into `folder`/run; return the configuration's file."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    file = folder / "tiny.toml"
    file.write_text(TOML.format(text=text, output=folder / "run"))
    return file


def tiny_config(folder: Path, **overrides: object) -> TrainConfig:
    """Return the configuration, with settings such as `run__steps=3` replaced."""
    return load_config(write_config(folder), {key.replace("__", "."): value for key, value in overrides.items()})


def losses(run: Path) -> list[tuple[int, str]]:
    """Return the step and every bit of the loss of each line."""
    lines = [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss_hex"]) for line in lines]


def command(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    line = [sys.executable, "-m", "tierstep.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False, **options)
