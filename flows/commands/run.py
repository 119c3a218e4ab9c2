"""`specrl run`, `resume`, `stop`, `cancel`, `sync` and `rm`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import to_jsonable_python
from rich.console import Console
from rich.filesize import decimal

from flows.change import change_run
from flows.commands.options import Cluster, ConfigPath, Overrides, RunName, RunsDir, load, option, print_json
from flows.commands.watch import Watcher
from flows.execute import continue_with_own_code, execute
from flows.folder import LOCK_FILE, find_own_run, only_flow, size_of
from flows.origin import start_from
from flows.preflight import check, take_wandb_variables
from slurm.submit import backend_of, live_jobs
from specrl.config import STAGES, Config, ConfigError
from specrl.lineage.revision import adjustable_keys
from specrl.report.results import CONFIG_FILE, read_config, readable_config
from specrl.report.tables import print_line, print_table
from tasks.run import ask_to_stop, end_jobs

CHANGEABLE = (
    "Training continues with another value of: "
    + ", ".join(adjustable_keys())
    + ". Other settings of the model, the data and "
    "the stages before training make it start over (--restart); those of [validate], resources and cluster do not."
)
FROM = """Start from the policy, drafter and optimizer in a checkpoint of another run (by default its newest; RUN@40:
that after 40 steps), or from the policy in a Hugging Face folder. The new run counts its steps from 0."""
DRY_RUN = """Print the jobs, the memory of each rank, and what a step sends and stores; then check the data, the reward,
the disk and MLflow. Nothing is written or submitted."""
RESTART = "Let training start over if a change, or a lost checkpoint, makes that necessary."
DETACH = "Also submit the flow, as a job with one core that continues in another when its time is up."
Detach = Annotated[bool, option(DETACH, name="--detach")]
DryJson = Annotated[bool, option("With --dry-run: print JSON on standard output.", name="--json")]


def run(
    config_path: ConfigPath,
    cluster: Cluster = None,
    overrides: Overrides = None,
    place: Annotated[str | None, option(FROM, "RUN[@STEP]", "--from")] = None,
    dry_run: Annotated[bool, option(DRY_RUN, name="--dry-run")] = False,
    as_json: DryJson = False,
    detach: Detach = False,
) -> None:
    """Run all stages of a configuration.

    Finished stages are skipped, and jobs that are still running are picked up again. Ctrl-C cancels the jobs.
    """
    _check_json(as_json, dry_run)
    config, origin = load(config_path, cluster, overrides), None
    if place is not None:
        config, origin = start_from(place, config)
    if dry_run:
        print_dry_run(config, as_json=as_json)
    else:
        execute(config, origin=origin, detached=detach)


def print_dry_run(config: Config, *, as_json: bool) -> None:
    """Print the plan of a run, then check what can be checked without the cluster and within seconds."""
    from specrl.projection.plan import plan
    from specrl.report.projection import print_plan

    planned = plan(config)
    options = {stage: backend_of(config.cluster_of(stage)).options(config, stage) for stage in STAGES}
    asked = {stage: config.resources_of(stage) for stage in STAGES}
    hours = sum(one.ranks * one.gpus_per_rank * one.minutes for one in asked.values()) / 60
    if as_json:
        jobs = {
            stage: {**one.model_dump(), "partition": config.cluster_of(stage).partition, "submission": options[stage]}
            for stage, one in asked.items()
        }
        shown = {name: value for name, value in vars(planned).items() if name not in ("config", "shape")}
        print_json(to_jsonable_python({"run": config.name, "jobs": jobs, "most_gpu_hours": hours, **shown}))
    else:
        print_plan(planned, options)
        if hours:
            print(f"at most {hours:,.1f} GPU-hours, if each stage ends within resources.minutes of one job")
    check(config, dry_run=True)


def resume(
    context: typer.Context,
    name: RunName,
    steps: Annotated[int | None, option("Train up to this many steps: train.num_steps.", least=1)] = None,
    overrides: Annotated[list[str] | None, option(f"Change a setting. {CHANGEABLE}", "KEY=VALUE", "--set")] = None,
    new_code: Annotated[bool, option("Go on with the present code, not the run's own.", name="--new-code")] = False,
    restart: Annotated[bool, option(RESTART, name="--restart")] = False,
    dry_run: Annotated[bool, option("Print what would stay, go on and be redone.", name="--dry-run")] = False,
    as_json: DryJson = False,
    detach: Detach = False,
    cluster: Cluster = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Continue a run with the code and settings it began with.

    Finished stages are skipped, and jobs that are still running are picked up again. If an option changes the run,
    the consequences for each stage are printed first. Training then continues from its newest checkpoint, and nothing
    that was made before is removed.
    """
    _check_json(as_json, dry_run)
    run_dir = find_own_run(name, runs_dir)
    chosen = [f'cluster.backend="{cluster}"'] if cluster else []
    chosen += [f"train.num_steps={steps}"] if steps is not None else []
    changed = (*(overrides or []), *chosen)
    if not new_code:
        continue_with_own_code(run_dir, context.obj)
    if changed or new_code or restart or dry_run:
        console = Console(soft_wrap=True, stderr=as_json or not dry_run)
        revision = change_run(run_dir, changed, console, new_code=new_code, restart=restart, dry_run=dry_run)
        if as_json:
            shown = {"stages": [vars(stage) for stage in revision.stages], "changes": list(map(str, revision.changes))}
            print_json({"run": run_dir.name, "new_code": revision.new_code, **shown})
    if not dry_run:
        execute(read_config(run_dir), resumed=True, detached=detach)


def _check_json(as_json: bool, dry_run: bool) -> None:
    if as_json and not dry_run:
        raise ConfigError("--json is for --dry-run; of a run, specrl show --json and specrl watch --json print it")


def stop(
    name: RunName,
    wait: Annotated[bool, option("Return when nothing works on the run any more.", name="--wait")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Ask a run to stop where it can continue later.

    Training finishes its step and writes a checkpoint; other stages end at once. Without --wait the command does not
    wait for the jobs to end, only up to ten minutes for a scheduler that does not answer; the request stands even if
    you interrupt it. `specrl resume` continues the run. It also says if the run has finished or has no jobs.
    """
    run_dir = find_own_run(name, runs_dir)
    watcher = Watcher(run_dir, readable_config(run_dir))
    view = watcher.look()
    of_jobs = ask_to_stop(run_dir) if view.state != "finished" else []
    for line in of_jobs:
        print(line)
    if of_jobs or not view.is_over:
        print(f"{run_dir.name} is asked to stop; continue it with: specrl resume {run_dir.name}")
        if not wait:
            return
        view = next(view for view in watcher.views() if view.is_over)
    print(view.end)


def cancel(name: RunName, runs_dir: RunsDir = Path("runs")) -> None:
    """End the jobs of a run now, without a checkpoint.

    `specrl stop` lets training finish its step. `specrl resume` continues the run from its newest checkpoint.
    """
    run_dir, ended = find_own_run(name, runs_dir), list[str]()
    end_jobs(run_dir, ended.append)
    for line in ended or [f"run {run_dir.name} has no job"]:
        print(line)


def sync(name: RunName, runs_dir: RunsDir = Path("runs")) -> None:
    """Send what a run logged while MLflow or W&B was down.

    W&B is included unless tracking.wandb is "off".

    A run does this itself as soon as MLflow answers; use the command if the run ended before that.
    """
    from specrl.tracking import runs

    config = read_config(find_own_run(name, runs_dir))
    take_wandb_variables(config)
    if lines := runs.sync_run(config, runs.SYNC_PATIENCE_SECONDS):
        raise ConfigError("; ".join(lines))
    trackers = "MLflow has" if config.tracking.wandb == "off" else "MLflow and W&B have"
    print(f"{trackers} everything that {config.name} has logged")


def rm(
    name: RunName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Remove a run.

    What will be removed, and its size, is printed first. Links are removed, but not what they point to. MLflow keeps
    what the run logged there.
    """
    run_dir = find_own_run(name, runs_dir)
    if run_dir.is_symlink():
        raise ConfigError(f"{run_dir} is a link to {run_dir.readlink()}; remove the run there, and then the link")
    config = readable_config(run_dir)
    with only_flow(run_dir, config.cluster):
        for folder in (run_dir, run_dir / "bench" / "cells"):  # benchmarks have jobs of their own
            for job in live_jobs(readable_config(folder)).values():
                what = config.name if folder == run_dir else str(folder)
                raise ConfigError(
                    f"{job.backend} job {job.job_id} works on run {what}; end it first: specrl stop {what}"
                )
        # The lock is held until the rest is gone; the record comes last, so that a killed removal can be repeated.
        paths = sorted(run_dir.iterdir(), key=lambda path: (path.name == CONFIG_FILE, path.name))
        sizes = {path: size_of(path) for path in paths if path.name != LOCK_FILE}
        rows = [(path.name, decimal(size)) for path, size in sizes.items()]
        rows.append(("all", decimal(sum(sizes.values()))))
        print_table(f"To be removed from {run_dir}", ("what", ">size"), rows)
        print_line(
            "MLflow keeps what the run has logged; registered model versions whose files lie in this folder lose them"
        )
        if not yes and not sys.stdin.isatty():
            raise ConfigError(f"run {run_dir.name}: nobody can be asked here; --yes removes without asking")
        if not yes:
            typer.confirm("Remove this?", abort=True)
        with _refusals():
            for path in (*sizes, run_dir / LOCK_FILE):
                remove(path)
    with _refusals():
        run_dir.rmdir()  # not earlier: until it is closed, NFS keeps the lock file under another name
    print_line(f"removed {decimal(sum(sizes.values()))}")


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors of removal into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be removed ({error.strerror}); what is left of the run can be removed by hand"
        ) from error


def remove(path: Path) -> None:
    """Remove a file, a link (but not its target), or a folder with everything in it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)
