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
from specrl.report.results import find_stages, read_config
from specrl.report.tables import print_line, print_table

if TYPE_CHECKING:
    from specrl.projection.projected import Projection
    from specrl.projection.simulator.workload import Lengths

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
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="With --published: also write the rows to this file.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Simulate how long steps would take.

    For a finished run: how long generation would take on more ranks with each use of idle time (bubbles.use), at the
    run's measured speeds and response lengths. For a configuration: what each number of drafts and bubbles would gain
    on its GPUs, from their data sheets. With --published: the speedups of published results beside the simulated ones.
    """
    if published:
        project_published(json_path)
    elif name is None:
        raise ConfigError("specrl project: name a run or a configuration file, or use --published")
    elif name.endswith(".toml"):
        project_config(Path(name), hardware, acceptance, lengths)
    else:
        project_run(name, ranks, runs_dir)


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


def project_run(name: str, ranks: str, runs_dir: Path) -> None:
    """Print how long a run's generation would take on more ranks."""
    from specrl.projection.measured import ASSUMED_REPLAYED_TOKENS, read_run
    from specrl.projection.projected import agreement, project_uses
    from specrl.projection.tail import USES

    counts = _numbers(ranks)
    run_dir = find_run(name, runs_dir)
    config, stages = read_config(run_dir), find_stages(run_dir)
    if "train" not in stages:
        raise ConfigError(f"run {run_dir.name} has not been trained yet; continue it with: specrl resume {name}")
    try:
        train_dir = stages["train"].stage_dir
        run = read_run(train_dir / "steps", train_dir / "rollouts")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    most_running, console = config.engine.max_num_seqs, Console()
    found = agreement(run, config.bubbles.use, most_running)
    print_line(
        console,
        f"the run itself: generation takes {found.generation_s[0]:.1f} s simulated, {found.generation_s[1]:.1f} s "
        f"measured ({found.generation_error:+.1%}); decoding steps {found.iterations[0]:.0f} simulated, "
        f"{found.iterations[1]:.0f} measured",
    )
    if not run.has_replayed:
        print_line(console, f"the run replayed no text: {ASSUMED_REPLAYED_TOKENS:.0f} tokens an iteration are assumed")
    print_line(console, "every use is simulated at this run's speeds; specrl bench bubbles measures those of each use")
    simulated = [use for use in USES if use != "train_drafter"]  # it changes nothing but the speed
    rows = [_row(item) for item in project_uses(dict.fromkeys(simulated, run), most_running, counts)]
    print_table(console, f"Simulated generation of one step of {run_dir.name}", COLUMNS, rows)


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
