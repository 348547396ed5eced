"""Taking a checkpoint elsewhere: verified first, then streamed into another format, and there only when it is whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tierstep.engine.interchange.dcp_export import export_dcp
from tierstep.engine.interchange.safetensors_export import export_safetensors
from tierstep.engine.interchange.source import CheckpointSource
from tierstep.engine.interchange.torch_export import export_torch
from tierstep.engine.interchange.transfer import Exported, Meter, OnProgress
from tierstep.engine.manifest import read_manifest
from tierstep.engine.restoring import saved_nbytes, verify_files
from tierstep.errors import ConfigError
from tierstep.io.drafts import require_absent


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "torch",
    on_progress: OnProgress = lambda done, total: None,
) -> Exported:
    """Write the checkpoint (a `step-*` folder) to the new file or folder `target` in another format. Blocks.

    `to="torch"`: one file with the `state_dict` of `torch.optim.AdamW`: `state` and `param_groups` (with
    `param_names`), fp32; beside them `fp32_weights`, the exact fp32 weight of each trained parameter by its name, and
    `weight_dtypes`, the dtypes of the model's weights, which torch's optimizer passes over.

    `to="safetensors"`: a folder with `model.safetensors`, the weights and buffers as they are in the model, which
    transformers' `from_pretrained` loads beside a `config.json`, and `optimizer.safetensors`: `<name>.exp_avg`,
    `<name>.exp_avg_sq` and, for weights that are not fp32, `<name>.fp32_weight`; `steps` and `param_groups` are JSON in
    its metadata.

    `to="dcp"`: a folder for `torch.distributed.checkpoint.load`, with `{"model": ..., "optimizer": ...,
    "fp32_weights": ...}`, where `optimizer` is what torch's `get_optimizer_state_dict` returns for AdamW.

    Every byte of the checkpoint is verified first. Takes memory for a few pieces of 16 MiB, whatever the model's size;
    `on_progress(done, total)` has bytes read and written. `target` is there when it is whole and durable, or not at
    all. Raises `ConfigError` for a target that exists and an unknown format, `CheckpointCorrupt`, `CheckpointMismatch`
    for a checkpoint that was saved without what the format holds, `DiskFull` saying how much is missing, and
    `TransferError`.
    """
    write = FORMATS.get(to)
    if write is None:
        raise ConfigError(f"to={to!r}: give one of {', '.join(FORMATS)}")
    folder, target = Path(checkpoint).resolve(), Path(target)
    require_absent(target)
    manifest = read_manifest(folder)
    meter = Meter(saved_nbytes(folder, manifest), on_progress)
    verify_files(folder, manifest, meter.add)
    return write(CheckpointSource(folder, manifest), target, meter)


FORMATS: dict[str, Callable[[CheckpointSource, Path, Meter], Exported]] = {
    "torch": export_torch,
    "safetensors": export_safetensors,
    "dcp": export_dcp,
}
