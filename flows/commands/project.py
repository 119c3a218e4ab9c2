"""`specrl project`: simulate what idle time costs a run on more ranks, and what using it would save."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flows.commands.options import RunName, RunsDir
from flows.folder import find_run
from specrl.config import ConfigError
from specrl.report.results import find_stages, read_config
from specrl.report.tables import print_line, print_table

if TYPE_CHECKING:
    from specrl.projection.projected import Projection

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
    name: RunName,
    ranks: Annotated[
        str, typer.Option(metavar="NUMBERS", help="The numbers of ranks to simulate, separated by commas.")
    ] = "8,32,128",
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Simulate a run on more ranks.

    The command takes the run's measured speeds and response lengths, and predicts how long generation would take on
    more ranks with each use of idle time (bubbles.use).
    """
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
