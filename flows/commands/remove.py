"""`specrl rm`: remove a run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.options import RunName, RunsDir
from flows.folder import LOCK_FILE, find_own_run, only_flow, size_of
from slurm.submit import live_jobs
from specrl.config import ConfigError
from specrl.report.results import CONFIG_FILE, readable_config
from specrl.report.tables import print_line, print_table

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def rm(
    name: RunName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Remove a run.

    What will be removed is printed with its size first. Links are removed, and nothing that they point to. MLflow keeps
    what the run has logged there.
    """
    run_dir = find_own_run(name, runs_dir)
    if run_dir.is_symlink():
        raise ConfigError(f"{run_dir} is a link to {run_dir.readlink()}; remove the run there, and then the link")
    console = Console(soft_wrap=True, highlight=False)
    config = readable_config(run_dir)
    with only_flow(run_dir, config.cluster):
        for job in live_jobs(config).values():
            raise ConfigError(
                f"{job.backend} job {job.job_id} works on run {config.name}; end it first: specrl stop {config.name}"
            )
        targets = _everything(run_dir)
        _show(console, run_dir, targets)
        print_line(
            console,
            "MLflow keeps what the run has logged; registered model versions whose files lie in this folder lose them",
        )
        if not yes and not sys.stdin.isatty():
            raise ConfigError(f"run {run_dir.name}: nobody can be asked here; --yes removes without asking")
        if not yes:
            typer.confirm("Remove this?", abort=True)
        freed = sum(size_of(target) for target in targets)
        with _in_one_line():
            for target in [*targets, run_dir / LOCK_FILE]:
                remove(target)
    with _in_one_line():
        run_dir.rmdir()  # not before: NFS keeps the file of the lock, under another name, until it is closed
    print_line(console, f"removed {in_words(freed)}")


def _everything(run_dir: Path) -> list[Path]:
    """All but the lock, which is held until the rest is gone; what makes it a run comes last, after a kill too."""
    found = (path for path in run_dir.iterdir() if path.name != LOCK_FILE)
    return sorted(found, key=lambda path: (path.name == CONFIG_FILE, path.name))


def _show(console: Console, run_dir: Path, targets: list[Path]) -> None:
    rows = [(str(target.relative_to(run_dir)), in_words(size_of(target))) for target in targets]
    rows.append(("all", in_words(sum(size_of(target) for target in targets))))
    print_table(console, f"To be removed from {run_dir}", ("what", ">size"), rows)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with everything in it. What a link points to stays."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be removed ({error.strerror}); what is left of the run can be removed by hand"
        ) from error


def in_words(size: float) -> str:
    """A number of bytes in words, such as `1.5 GiB`."""
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {UNITS[unit]}" if unit == 0 else f"{size:.1f} {UNITS[unit]}"
