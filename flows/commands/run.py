"""`specrl run` and `specrl resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.execute import execute
from flows.folder import anchor, find_run
from slurm.registry import backend_of
from specrl.config import load_config

Cluster = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Where the jobs run, instead of cluster.backend: local, slurm, or module:Class."),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Folder that holds the runs.")]


def register(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("resume")(resume)


def run(
    config_path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.")],
    cluster: Cluster = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print jobs and memory; submit nothing.")] = False,
) -> None:
    """Run the pipeline: what is finished is skipped, what still runs is joined."""
    backend = [f'cluster.backend="{cluster}"'] if cluster else []
    config = anchor(load_config(config_path, [*(overrides or []), *backend]))
    if dry_run:
        from specrl.projection.plan import plan, render

        render(plan(config, backend_of(config.cluster).queue(config.cluster)))
        return
    execute(config)


def resume(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its folder.")],
    cluster: Cluster = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Go on with a run whose flow was ended: its configuration is the one in its folder."""
    from tasks.run import read_run_config

    config = read_run_config(find_run(name, runs_dir))
    if cluster:
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"backend": cluster})})
    execute(config)
