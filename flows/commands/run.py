"""`specrl run`, `resume`, `stop` and `sync`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.change import ChangeRequest, change_run
from flows.commands.options import Cluster, ConfigPath, Overrides, RunName, RunsDir, load
from flows.execute import continue_with_own_code, execute
from flows.folder import find_own_run
from flows.origin import start_from
from flows.preflight import check
from slurm.registry import backend_of
from specrl.config import STAGES, Config, ConfigError
from specrl.lineage.changes import adjustable_keys
from tasks.run import ask_to_stop, read_run_config

CHANGEABLE = (
    "Training goes on with another value of: "
    + ", ".join(adjustable_keys())
    + ". Other settings of the model, the data and "
    "the stages before training make it start over (--restart); those of [validate], resources and cluster do not."
)


def register(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("resume")(resume)
    app.command("stop")(stop)
    app.command("sync")(sync)


def run(
    config_path: ConfigPath,
    cluster: Cluster = None,
    overrides: Overrides = None,
    place: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP]",
            help="Start from the policy, the drafter and the optimizer of another run, after a step whose checkpoint "
            "it has, by default the newest; or from the policy in a Hugging Face folder. Steps count from 0.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the jobs, the memory of each rank, and what a step sends and stores; then check the data, the "
            "reward, the disk and MLflow. Nothing is written or submitted.",
        ),
    ] = False,
) -> None:
    """Run all stages of a configuration.

    Stages that have finished are skipped, and jobs that are still running are waited for. Ctrl-C cancels the jobs.
    """
    config, origin = load(config_path, cluster, overrides), None
    if place is not None:
        config, origin = start_from(place, config)
    if dry_run:
        print_dry_run(config)
    else:
        execute(config, origin=origin)


def print_dry_run(config: Config) -> None:
    """Print the plan of a run, and then check what can be checked without the cluster and within seconds.

    Raises:
        ConfigError: The run does not fit, or would be refused; the plan has been printed unless it is what is wrong.
    """
    from specrl.projection.plan import plan
    from specrl.report.projection import print_plan

    clusters = {stage: config.cluster_of(stage) for stage in STAGES}
    queues = {stage: backend_of(cluster).queue(cluster) for stage, cluster in clusters.items()}
    options = {stage: backend_of(cluster).options(config, stage) for stage, cluster in clusters.items()}
    print_plan(plan(config), queues, options)
    check(config, dry_run=True)


def resume(
    name: RunName,
    steps: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Train up to this number of steps: train.num_steps.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=f"Change a setting. {CHANGEABLE}")
    ] = None,
    new_code: Annotated[
        bool, typer.Option("--new-code", help="Go on with the present code, in place of the run's own copy.")
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Let training start over where a change, or a lost checkpoint, makes that necessary."
        ),
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel jobs that are at work on a stage that changes.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what stays, what goes on and what is redone, and change nothing.")
    ] = False,
    cluster: Cluster = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Continue a run that was ended, with the code and the settings that it was started with.

    Stages that have finished are skipped, and jobs that are still running are waited for. With an option that changes
    the run, what that means for each stage is printed first. Training then goes on from its newest checkpoint, and
    nothing that was made before is removed.
    """
    run_dir = find_own_run(name, runs_dir)
    chosen = [f'cluster.backend="{cluster}"'] if cluster else []
    chosen += [f"train.num_steps={steps}"] if steps is not None else []
    changed = (*(overrides or []), *chosen)
    flags = {"--new-code": new_code, "--restart": restart, "--cancel": cancel, "--dry-run": dry_run}
    if not new_code:
        words = [word for override in changed for word in ("--set", override)]
        given = [flag for flag, is_given in flags.items() if is_given]
        continue_with_own_code(run_dir, ["resume", str(run_dir), *words, *given])
    if changed or new_code or restart or dry_run:
        change_run(run_dir, ChangeRequest(changed, new_code, restart, cancel), Console(soft_wrap=True), dry_run=dry_run)
    if not dry_run:
        execute(read_run_config(run_dir), resumed=True)


def stop(name: RunName, runs_dir: RunsDir = Path("runs")) -> None:
    """Ask a run to stop where it can go on later.

    Training finishes its step and writes a checkpoint; other stages leave at once. The command does not wait for the
    jobs to end, but up to ten minutes for a scheduler that does not answer; the request stands even if that is
    interrupted. `specrl resume` continues the run.
    """
    run_dir = find_own_run(name, runs_dir)
    for line in ask_to_stop(run_dir):
        print(line)
    print(f"{run_dir.name} is asked to stop; continue it with: specrl resume {run_dir.name}")


def sync(name: RunName, runs_dir: RunsDir = Path("runs")) -> None:
    """Send to MLflow what a run has logged while MLflow was away.

    A run does so itself as soon as MLflow answers; this is for a run that has ended before that.
    """
    from specrl.tracking import runs

    config = read_run_config(find_own_run(name, runs_dir))
    if lines := runs.sync_run(config, runs.SYNC_PATIENCE_SECONDS):
        raise ConfigError("; ".join(lines))
    print(f"MLflow has everything that {config.name} has logged")
