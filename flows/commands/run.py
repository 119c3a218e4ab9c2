"""`specrl run` and `specrl resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import Cluster, ConfigPath, Overrides, RunName, RunsDir, load
from flows.execute import execute
from flows.folder import find_run
from slurm.registry import backend_of
from specrl.config import STAGES


def register(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("resume")(resume)


def run(
    config_path: ConfigPath,
    cluster: Cluster = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the jobs and the memory of each rank, and submit nothing.")
    ] = False,
) -> None:
    """Run all stages of a configuration.

    Stages that have finished are skipped, and jobs that are still running are waited for. Ctrl-C cancels the jobs.
    """
    config = load(config_path, cluster, overrides)
    if dry_run:
        from specrl.projection.plan import plan, print_plan

        clusters = {stage: config.cluster_of(stage) for stage in STAGES}
        queues = {stage: backend_of(cluster).queue(cluster) for stage, cluster in clusters.items()}
        options = {stage: backend_of(cluster).options(config, stage) for stage, cluster in clusters.items()}
        print_plan(plan(config, queues, options))
        return
    execute(config)


def resume(name: RunName, cluster: Cluster = None, runs_dir: RunsDir = Path("runs")) -> None:
    """Continue a run that was ended.

    The configuration is the one in the run's folder. Stages that have finished are skipped, and jobs that are still
    running are waited for.
    """
    from tasks.run import read_run_config

    config = read_run_config(find_run(name, runs_dir))
    if cluster:
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"backend": cluster})})
    execute(config)
