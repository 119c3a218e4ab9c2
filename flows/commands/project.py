"""`specrl project`: simulate what idle time costs a run, and what its uses would save on more ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.folder import find_run
from specrl.config import ConfigError
from specrl.report.results import find_stages, read_config
from specrl.report.tables import print_line, print_table


def register(app: typer.Typer) -> None:
    app.command("project")(project)


def project(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its folder.")],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to look at.")] = "8,32,128",
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Folder that holds the runs.")] = Path("runs"),
) -> None:
    """Simulate the generation of a run's steps on more ranks, with the uses of idle time."""
    from specrl.projection.measured import ASSUMED_REPLAYED_TOKENS, read_run
    from specrl.projection.projected import agreement, project_uses
    from specrl.projection.tail import USES

    if not all(part.isdigit() and int(part) > 0 for part in ranks.split(",")):
        raise ConfigError(f"--ranks {ranks}: must be positive numbers, such as 8,32,128")
    run_dir = find_run(name, runs_dir)
    config, stages = read_config(run_dir), find_stages(run_dir)
    if "train" not in stages:
        raise ConfigError(f"run {run_dir.name} has not trained yet; go on with: specrl resume {run_dir.name}")
    try:
        run = read_run(stages["train"].stage_dir / "steps", run_dir / "rollouts")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    most_running, console = config.engine.max_num_seqs, Console()
    found = agreement(run, config.bubbles.use, most_running)
    print_line(
        console,
        f"the run itself: generation {found.generation_s[0]:.1f} s simulated, {found.generation_s[1]:.1f} s measured "
        f"({found.generation_error:+.1%}); decoding steps {found.iterations[0]:.0f} and {found.iterations[1]:.0f}",
    )
    if not run.has_replayed:
        print_line(console, f"no stored text was followed: {ASSUMED_REPLAYED_TOKENS:.0f} tokens an iteration assumed")
    print_line(
        console, "all uses are simulated at the speeds of this run; specrl bench bubbles measures each one's own"
    )
    simulated = [use for use in USES if use != "train_drafter"]  # it changes nothing but the speed
    rows = [
        (
            str(item.ranks),
            item.use,
            f"{item.generation_s:.2f}",
            f"{item.generation_ratio:.2f}",
            f"{item.decode_step_ratio:.2f}",
            f"{item.idle_share:.0%}",
            f"{item.used_share:.0%}",
        )
        for item in project_uses(dict.fromkeys(simulated, run), most_running, [int(part) for part in ranks.split(",")])
    ]
    columns = (">ranks", "bubbles", ">generation, s", ">of none", ">decoding steps, of none", ">idle", ">of it used")
    print_table(console, f"Generation of a step of {run_dir.name}, simulated", columns, rows)
