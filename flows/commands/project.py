"""`specrl project`: simulate a finished run on more ranks, a configuration on GPUs, or what others have published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flows.commands.options import RunsDir
from flows.folder import find_run
from specrl.artifacts import write_json
from specrl.config import ConfigError, load_config
from specrl.report.results import find_stages, finished, read_config
from specrl.report.tables import print_line, print_table

if TYPE_CHECKING:
    from specrl.projection.projected import Projection
    from specrl.projection.simulator.workload import Lengths
    from specrl.projection.steps.comparison import PartComparison, RunSteps

COLUMNS = (
    ">ranks",
    "bubbles.use",
    ">generation, s",
    ">relative to none",
    ">decoding steps relative to none",
    ">idle",
    ">idle time used",
)


def register(app: typer.Typer) -> None:
    app.command("project")(project)


def project(
    name: Annotated[
        str | None,
        typer.Argument(metavar="RUN|CONFIG", help="A run's name or folder, or a configuration file (.toml)."),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Simulate the settings of published results instead.")
    ] = False,
    ranks: Annotated[
        str, typer.Option(metavar="NUMBERS", help="For a run: the numbers of ranks, separated by commas.")
    ] = "8,32,128",
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For a configuration: H100, H200 or GB200; by default by gpu_memory_gib."),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(metavar="RATES", help="For a configuration: shares of drafts accepted at position 1,2,..."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="MEDIAN,SPREAD",
            help="For a configuration: the median response length in tokens, and its logarithm's standard deviation.",
        ),
    ] = None,
    calibrated_on: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="For a run: simulate its steps by what the parts of this other run's steps cost."
        ),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="For a run or with --published: also write the comparison to this file."
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Simulate how long steps would take.

    For a finished run: its own steps, part by part, beside what it measured of them; and how long generation would take
    on more ranks with each use of idle time (bubbles.use), at the run's measured speeds and response lengths. For a
    configuration: what each number of drafts and bubbles would gain on its GPUs, from their data sheets. With
    --published: the speedups of published results beside the simulated ones.
    """
    if published:
        project_published(json_path)
    elif name is None:
        raise ConfigError("specrl project: name a run or a configuration file, or use --published")
    elif name.endswith(".toml"):
        project_config(Path(name), hardware, acceptance, lengths)
    else:
        project_run(name, ranks, runs_dir, calibrated_on, json_path)


def project_published(json_path: Path | None) -> None:
    """Print published speedups beside the simulated ones."""
    from dataclasses import asdict

    from specrl.projection.simulator.hardware import Efficiency
    from specrl.projection.simulator.published import plain_rows, published_rows

    console, found = Console(), published_rows()
    columns = ("setting", "quantity", ">published", ">simulated", ">error")
    for title, rows in (("Speedups", found), ("Without speculation, by which lengths were chosen", plain_rows())):
        cells = [
            (row.setting, row.quantity, f"{row.published:.2f}", f"{row.simulated:.2f}", f"{row.error:+.1%}")
            for row in rows
        ]
        print_table(console, title, columns, cells)
    for line in Efficiency().lines():
        print_line(console, f"assumed: {line}")
    if json_path:
        write_json(json_path, [asdict(row) for row in found])


def project_config(path: Path, hardware: str | None, acceptance: str | None, lengths: str | None) -> None:
    """Print what each number of drafts and bubbles would gain on a configuration's GPUs."""
    from specrl.projection.simulator.choices import (
        ACCEPTANCE,
        CHOICE_COLUMNS,
        assumptions,
        choice_cells,
        choices,
        hardware_of,
        model_of,
    )

    config, console = load_config(path), Console()
    rates = _shares("--acceptance", acceptance) if acceptance else ACCEPTANCE
    model = model_of(config, hardware_of(config, hardware), _lengths(lengths, config.sampling.max_response_tokens))
    rows = [choice_cells(choice, model.gpus, config.train.num_steps) for choice in choices(model, rates)]
    title = f"Simulated steps of {path} on {model.gpus} {model.hardware.name}, engines of {model.engine_gpus}"
    print_table(console, title, CHOICE_COLUMNS, rows)
    for line in assumptions(model, rates):
        print_line(console, f"assumed: {line}")


def project_run(name: str, ranks: str, runs_dir: Path, calibrated_on: str | None, json_path: Path | None) -> None:
    """Print a run's steps as simulated and as measured, and how long its generation would take on more ranks."""
    from specrl.projection.measured import ASSUMED_REPLAYED_TOKENS
    from specrl.projection.projected import agreement, project_uses
    from specrl.projection.tail import USES

    counts = _numbers(ranks)
    found = _read_steps(name, runs_dir)
    run, use, most_running = found.generation, found.config.bubbles.use, found.config.engine.max_num_seqs
    console = Console()
    compare_steps(console, found, _read_steps(calibrated_on, runs_dir) if calibrated_on else None, json_path)
    own = agreement(run, use, most_running)
    print_line(console, f"decoding steps: {own.iterations[0]:.0f} simulated, {own.iterations[1]:.0f} measured")
    if not run.has_replayed:
        print_line(console, f"the run replayed no text: {ASSUMED_REPLAYED_TOKENS:.0f} tokens an iteration are assumed")
    print_line(console, "every use is simulated at this run's speeds; specrl bench run measures those of each use")
    simulated = [use for use in USES if use != "train_drafter"]  # it changes nothing but the speed
    rows = [_row(item) for item in project_uses(dict.fromkeys(simulated, run), most_running, counts)]
    print_table(console, f"Simulated generation of one step of {found.name}", COLUMNS, rows)


def compare_steps(console: Console, run: RunSteps, other: RunSteps | None, json_path: Path | None) -> None:
    """Print the parts of a run's steps as simulated by constants of other steps, and as measured.

    Args:
        other: The run whose steps calibrate; with None each half of the run's steps calibrates the other half.
        json_path: The file to which the rows are written, too; None for none.
    """
    from specrl.projection.steps.comparison import AIM, assumptions, causes, gaps, halves, transferred

    constants = (other or run).constants((other or run).steps)
    try:
        parts = halves(run) if other is None else transferred(run, other)
    except ValueError as error:
        if other is not None:
            raise ConfigError(str(error)) from error
        print_line(console, str(error))
        return
    source = other.name if other is not None else "the other half of its steps"
    title = f"The {len(run.steps)} steps of {run.name}, simulated with costs measured in {source}"
    columns = ("part", ">measured, s", ">simulated, s", ">error", ">median error of a step")
    print_table(console, title, columns, [_cells(part) for part in parts])
    for part in parts:
        if abs(part.error) > AIM:
            print_line(console, f"{part.name} is off by more than {AIM:.0%}: {causes(run.steps, part)}")
    for line in gaps(run.steps, constants) if other else ():
        print_line(console, line)
    for line in assumptions(constants):
        print_line(console, f"assumed: {line}")
    if json_path:
        names = {"run": run.name, "calibrated_on": other.name if other is not None else run.name}
        write_json(json_path, [{**names, **part.as_json()} for part in parts])


def _read_steps(name: str, runs_dir: Path) -> RunSteps:
    """Return the steps of a finished run.

    Raises:
        ConfigError: The run has not been trained.
    """
    from specrl.artifacts import PrepareResult
    from specrl.models.shapes import model_shape
    from specrl.projection.measured import read_run
    from specrl.projection.steps.comparison import RunSteps

    run_dir = find_run(name, runs_dir)
    config, stages = read_config(run_dir), find_stages(run_dir)
    if "train" not in stages:
        raise ConfigError(f"run {run_dir.name} has not been trained yet; continue it with: specrl resume {name}")
    train_dir = stages["train"].stage_dir
    prepared = finished(stages, "prepare", PrepareResult)
    model = config.model.model_copy(update={"source": str(prepared.policy_dir)}) if prepared else config.model
    try:
        generation = read_run(train_dir / "steps", train_dir / "rollouts")
        return RunSteps.read(run_dir.name, config, train_dir, model_shape(model), generation)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _cells(part: PartComparison) -> tuple[str, ...]:
    measured, simulated = sum(part.measured), sum(part.simulated)
    return part.name, f"{measured:.2f}", f"{simulated:.2f}", f"{part.error:+.1%}", f"{part.step_error:.1%}"


def _row(item: Projection) -> tuple[str, ...]:
    return (
        str(item.ranks),
        item.use,
        f"{item.generation_s:.2f}",
        f"{item.generation_ratio:.2f}",
        f"{item.decode_step_ratio:.2f}",
        f"{item.idle_share:.0%}",
        f"{item.used_share:.0%}",
    )


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list such as `8,32,128`.

    Raises:
        ConfigError: The list is not one of positive whole numbers.
    """
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--ranks {text}: allowed: positive whole numbers separated by commas, such as 8,32,128")
    return [int(part) for part in parts]


def _shares(option: str, text: str) -> list[float]:
    """Return the falling shares of a list such as `0.8,0.7,0.6`.

    Raises:
        ConfigError: The list is not one of numbers above 0, at most 1, none of which is larger than the one before.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    falls = all(after <= before for before, after in zip([1.0, *shares], shares, strict=False))
    if not shares or not falls or shares[-1] <= 0:
        raise ConfigError(
            f"{option} {text}: allowed: falling numbers above 0 and at most 1, separated by commas, such as 0.8,0.7,0.6"
        )
    return shares


def _lengths(text: str | None, limit: int) -> Lengths | None:
    """Return the lengths of `MEDIAN,SPREAD`, cut at the limit.

    Raises:
        ConfigError: The text is not two positive numbers.
    """
    from specrl.projection.simulator.workload import Lengths

    if text is None:
        return None
    try:
        median, spread = (float(part) for part in text.split(","))
    except ValueError:
        median = spread = 0.0
    if not (median > 0 and spread > 0):
        raise ConfigError(f"--lengths {text}: allowed: a median and a spread above 0, such as 2000,0.9")
    return Lengths(median, spread, limit)
