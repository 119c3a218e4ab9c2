"""`specrl rm`: remove a run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from flows.commands.options import RunName, RunsDir
from flows.folder import LOCK_FILE, find_own_run, only_flow, size_of
from slurm.submit import live_jobs
from specrl.config import ConfigError
from specrl.report.results import CONFIG_FILE, readable_config
from specrl.report.tables import print_line, print_table


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
        for job in live_jobs(config).values():
            raise ConfigError(
                f"{job.backend} job {job.job_id} works on run {config.name}; end it first: specrl stop {config.name}"
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
