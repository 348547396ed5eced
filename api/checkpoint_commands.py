"""The commands that work on checkpoints: `tierstep ckpt ...`. What they do is elsewhere."""

# ruff: noqa: FBT002 - flags are booleans with a default

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from tierstep.errors import CheckpointCorrupt, CheckpointError
from tierstep.terminal import AsJson, console, write_json

checkpoints_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, and take them elsewhere.")


@checkpoints_app.command("ls")
def list_checkpoints(directory: Path, as_json: AsJson = False) -> None:
    """List the complete checkpoints of a directory, oldest first."""
    from tierstep.engine.checkpoint import Checkpoints
    from tierstep.show import show_checkpoints

    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory: name one that holds checkpoints")
    found = Checkpoints(directory).list()
    if as_json:
        write_json([dataclasses.asdict(info) for info in found])
    else:
        show_checkpoints(console(), found)


@checkpoints_app.command("verify")
def verify_checkpoints(path: Path) -> None:
    """Read every byte of a checkpoint, or of all in a directory, and compare it with its checksum."""
    from tierstep.engine.checkpoint import verify_checkpoint

    damage = []
    for folder in _checkpoints_at(path):
        try:
            info = verify_checkpoint(folder)
        except CheckpointError as error:
            damage.append(str(error))
            sys.stdout.write(f"{folder}: damaged\n")
        else:
            sys.stdout.write(f"{folder}: step {info.step}, {info.nbytes} bytes, sound\n")
    if damage:
        raise CheckpointCorrupt("; ".join(damage))


@checkpoints_app.command("export")
def export_one(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint, or a directory: its newest one.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new file or folder.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="torch, safetensors or dcp.")],
) -> None:
    """Write a checkpoint in another format; every byte of it is verified first.

    torch: one file for torch.optim.AdamW.load_state_dict, with the exact fp32 weights. safetensors: a folder with the
    weights for transformers, and the state. dcp: a folder for torch.distributed.checkpoint.load.
    """
    from tierstep.engine.interchange.exporting import export_checkpoint
    from tierstep.transfer_bar import transfer_bar

    folder = _newest_at(checkpoint)
    with transfer_bar(console(), "exporting") as on_progress:
        done = export_checkpoint(folder, target, to=to, on_progress=on_progress)
    sys.stdout.write(f"{done.path}: {done.nbytes} bytes from {folder}\n")
    if done.without_weights:
        first, more = ", ".join(done.without_weights[:3]), len(done.without_weights) - 3
        others = f" and {more} more" if more > 0 else ""
        sys.stdout.write(f"note: {folder} holds no weight for {first}{others}: fp32_weights lacks them\n")


@checkpoints_app.command("prune")
def prune_checkpoints(
    directory: Path,
    keep: Annotated[int, typer.Option("--keep", metavar="N", help="The N newest stay.")],
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="M", help="Steps that are multiples of M stay too.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
) -> None:
    """Delete the older checkpoints of a directory, and nothing else in it."""
    from tierstep.engine.retention import Retention, prune

    gone = prune(directory, Retention(keep, keep_every), dry_run=dry_run)
    for info in gone:
        sys.stdout.write(f"{'would delete' if dry_run else 'deleted'} {info.path}\n")
    if not gone:
        sys.stdout.write(f"nothing to delete in {directory}\n")


def _newest_at(path: Path) -> Path:
    """Return the checkpoint at `path`, or the newest complete one in it."""
    from tierstep.engine.catalog import newest

    found = _checkpoints_at(path)
    return path if found == [path] else newest(path) or found[-1]


def _checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint at `path`, or all that lie in it, by name."""
    from tierstep.engine.catalog import NAME
    from tierstep.engine.manifest import MANIFEST_NAME

    if NAME.fullmatch(path.absolute().name) or (path / MANIFEST_NAME).exists():
        return [path]
    found = sorted(folder for folder in path.glob("*") if NAME.fullmatch(folder.name))
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: name one, or a directory of them")
    return found
