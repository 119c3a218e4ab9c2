"""`specrl run` and `specrl resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from flows.folder import anchor, find_run, only_flow, write_config
from flows.preflight import check
from flows.server import PrefectServer
from slurm.devcluster import DevCluster
from specrl.config import Config, load_config

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


def execute(config: Config) -> None:
    """Check, write the run's folder, run the flow, print what came of it.

    Raises:
        ConfigError: the run cannot start; nothing has been written.
        JobError: a stage failed.
    """
    if config.cluster.backend == "slurm":
        DevCluster().use_if_up()
    check(config)
    console = Console(soft_wrap=True)
    with only_flow(config.run_dir), PrefectServer(config.runs_dir) as server:
        write_config(config)
        # MLflow takes seconds to import and to make its database; Prefect's server starts meanwhile.
        from specrl.tracking import finish_parent_run, start_parent_run

        console.print(f"run {config.name} in {config.run_dir}", markup=False)
        run_id = start_parent_run(config)
        server.wait()
        try:
            _flow(config.run_dir)
        except KeyboardInterrupt:
            finish_parent_run(config, run_id, "KILLED")
            raise
        except Exception:  # not one: a signal that ends the flow; its jobs go on, and so does the run
            finish_parent_run(config, run_id, "FAILED")
            raise
        finish_parent_run(config, run_id, "FINISHED")
    from specrl.report.summary import render_summary

    render_summary(config.run_dir, console)


def _flow(run_dir: Path) -> None:
    from flows.leftovers import end_killed_flows  # imports Prefect, which reads its environment once
    from flows.pipeline import pipeline

    end_killed_flows(run_dir)
    pipeline(str(run_dir))
