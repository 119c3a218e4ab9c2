"""`specrl run` and `specrl resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.execute import execute
from flows.folder import anchor, find_run
from specrl.config import load_config

Backend = Literal["local", "slurm"]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder that holds the runs.")]


def register(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("resume")(resume)


def run(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.")],
    cluster: Annotated[Backend | None, typer.Option(help="Where the jobs run, instead of cluster.backend.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print jobs and memory; submit nothing.")] = False,
) -> None:
    """Run the pipeline: what is finished is skipped, what still runs is joined."""
    backend = [f'cluster.backend="{cluster}"'] if cluster else []
    config = anchor(load_config(config_path, [*(overrides or []), *backend]))
    if dry_run:
        from specrl.projection.plan import plan, render

        render(plan(config))
        return
    execute(config)


def resume(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its folder.")],
    cluster: Annotated[Backend | None, typer.Option(help="Where the jobs run from now on.")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Go on with a run whose flow was ended: its configuration is the one in its folder."""
    from tasks.run import read_run_config

    config = read_run_config(find_run(name, runs_dir))
    if cluster:
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"backend": cluster})})
    execute(config)
