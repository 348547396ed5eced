"""The command line. Commands only: what they do is elsewhere, what they print is in show.py."""

# ruff: noqa: FBT002 - flags are booleans with a default

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tierstep.checkpoint_commands import checkpoints_app
from tierstep.configs.load import load_config, parse_override
from tierstep.configs.schema import Model, TrainConfig
from tierstep.errors import ConfigError, TierstepError
from tierstep.terminal import AsJson, console, write_json
from tierstep.version import __version__

FAILED = 2
SIGNAL_BASE = 128  # shells' code for "ended by signal n" is 128 + n
BESIDE_A_PATH = ("dtype", "activation_checkpointing")  # settings of [model] that go together with --model

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(checkpoints_app, name="ckpt")

Source = Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a preset.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Such as run.steps=50.")]
ModelPath = Annotated[Path | None, typer.Option("--model", help="Local Hugging Face folder or config.json.")]
DataPath = Annotated[Path | None, typer.Option("--data", help="A text file or a folder of them.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run.")]
Steps = Annotated[int | None, typer.Option("--steps", help="Train up to this step.")]


def main() -> None:
    """Run the command line. A `TierstepError` becomes one line on stderr and exit code 2."""
    try:
        app()
    except TierstepError as error:
        sys.stderr.write(f"error: {' '.join(str(error).splitlines())}\n")
        raise SystemExit(FAILED) from None


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - called by typer
    if wanted:
        sys.stdout.write(f"tierstep {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Train PyTorch models whose optimizer state fits neither on the GPU nor in host RAM."""


@app.command()
def train(
    source: Source,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the newest checkpoint.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Set the old run aside and begin anew.")] = False,
    steps: Steps = None,
    data: DataPath = None,
    model: ModelPath = None,
    out: Out = None,
    settings: Settings = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="DIR", help="Draw a step's timeline there.")] = None,
    trace_steps: Annotated[
        list[int] | None, typer.Option("--trace-step", metavar="N", help="Of these steps. Default: the last one.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the JSON line only.")] = False,
) -> None:
    """Train a model on text; the last line of the output is JSON."""
    config = _config(source, settings, model, {"run.steps": steps, "data.path": data, "run.output": out})
    from tierstep.json_values import result_values
    from tierstep.observer import Together
    from tierstep.progress import ProgressBar, ProgressLines
    from tierstep.show import show_result
    from tierstep.timelines import TimelineFiles
    from tierstep.train import train as run

    screen = console(quiet=quiet)
    observers = [] if trace is None else [TimelineFiles(trace, trace_steps or ())]
    with (ProgressBar if screen.is_terminal else ProgressLines)(screen) as progress:
        result = run(config, resume=resume, fresh=fresh, observer=Together(progress, *observers))
    show_result(screen, result)
    write_json(result_values(result))
    if result.stopped_by is not None:
        raise typer.Exit(SIGNAL_BASE + result.stopped_by)


@app.command()
def plan(
    source: Source,
    data: DataPath = None,
    model: ModelPath = None,
    out: Out = None,
    settings: Settings = None,
    as_json: AsJson = False,
    measure: Annotated[bool, typer.Option(help="Measure this machine's speed, a few seconds.")] = True,
) -> None:
    """Show what a run will take, before anything of it runs."""
    config = _config(source, settings, model, {"data.path": data, "run.output": out})
    from tierstep.forecast import forecast
    from tierstep.json_values import forecast_values
    from tierstep.show import show_forecast

    found = forecast(config, measure=measure)
    if as_json:
        write_json(forecast_values(found))
    else:
        show_forecast(console(), found)


@app.command()
def doctor(
    directories: Annotated[list[Path] | None, typer.Argument(metavar="[DIR]...", help="Default: this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine has: versions, backends, kernel, memory, directories."""
    from tierstep.doctor import examine
    from tierstep.show import show_diagnosis

    found = examine(directories or [Path()])
    if as_json:
        write_json(dataclasses.asdict(found))
    else:
        show_diagnosis(console(), found)
    if found.problems:
        raise ConfigError("; ".join(found.problems))


@app.command()
def calibrate(
    nvme: Annotated[list[Path], typer.Option("--nvme", metavar="DIR", help="Directories that are used together.")],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[DIR]...", help="More of them.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="How long to measure.")] = 6.0,
    as_json: AsJson = False,
) -> None:
    """Measure which I/O engine suits directories best; `backend = "auto"` takes it from then on."""
    from tierstep.calibrate import calibrate as run
    from tierstep.calibrate import calibration_values, show_calibration

    screen = console(quiet=as_json)
    found = run([*nvme, *(more or [])], seconds=seconds, console=screen)
    if as_json:
        write_json(calibration_values(found))
    else:
        show_calibration(screen, found)


def _config(source: str, settings: Sequence[str] | None, model: Path | None, options: dict[str, object]) -> TrainConfig:
    """Return the configuration, after --set and then the options that were given have replaced what the file says."""
    given = dict(parse_override(text) for text in settings or [])
    given |= {key: value for key, value in options.items() if value is not None}
    config = load_config(source, given)
    if model is None:
        return config
    kept = {key: getattr(config.model, key) for key in BESIDE_A_PATH}
    kept |= {key.removeprefix("model."): value for key, value in given.items() if key.startswith("model.")}
    return config.model_copy(update={"model": Model(path=model, **kept)})


if __name__ == "__main__":
    main()
