"""`specrl rm`: remove a run, or the large files of it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flows.commands.options import RunName, RunsDir
from flows.folder import find_run, list_runs, only_flow
from slurm.registry import backends_of
from slurm.submit import live_jobs
from specrl.artifacts import RESULT_FILE
from specrl.config import ConfigError, StageName
from specrl.lineage.record import read_record
from specrl.report.results import CONFIG_FILE
from specrl.report.tables import print_line, print_table
from tasks.run import read_run_config

STARTING: tuple[StageName, ...] = ("prepare", "pretrain", "train")
"""The stages that may start from a checkpoint of another run."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def register(app: typer.Typer) -> None:
    app.command("rm")(rm)


def rm(
    name: RunName,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Remove only the checkpoints that training goes on from.")
    ] = False,
    rollouts: Annotated[bool, typer.Option("--rollouts", help="Remove only the rollouts of training.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Remove a run, or only its checkpoints or rollouts.

    What will be removed is printed with its size first. Links are removed, and nothing that they point to. MLflow keeps
    what the run has logged there.
    """
    run_dir = find_run(name, runs_dir)
    if run_dir.is_symlink():
        raise ConfigError(f"{run_dir} is a link to {run_dir.readlink()}; remove the run there, and then the link")
    console = Console(soft_wrap=True, highlight=False)
    with only_flow(run_dir):
        _check_jobs(run_dir)
        parts = [part for part, asked in (("checkpoints", checkpoints), ("rollouts", rollouts)) if asked]
        targets = _parts(run_dir, parts) if parts else _everything(run_dir)
        if not targets:
            print_line(console, f"run {run_dir.name} has no {' and no '.join(parts)}")
            return
        if "checkpoints" in parts or not parts:
            _check_forks(run_dir)
        _show(console, run_dir, targets)
        if "checkpoints" in parts or not parts:
            _warn(console, run_dir, whole=not parts)
        if not yes:
            _ask(run_dir.name)
        freed = sum(size_of(target) for target in targets)
        for target in targets:
            remove(target)
        if not parts:
            run_dir.rmdir()
    print_line(console, f"removed {in_words(freed)}")


def _check_jobs(run_dir: Path) -> None:
    """Refuse to remove anything that a job may need.

    Raises:
        ConfigError: A job of the run is pending or running.
    """
    config = read_run_config(run_dir)
    for backend in backends_of(config):
        backend.connect()
    for job in live_jobs(config).values():
        raise ConfigError(
            f"{job.backend} job {job.job_id} works on run {run_dir.name}; end it first: specrl stop {run_dir.name}"
        )


def _parts(run_dir: Path, parts: list[str]) -> list[Path]:
    """Return the folders of these names in the folders of the stages."""
    stages = sorted(path for path in (run_dir / "stages").glob("*") if path.is_dir() and not path.is_symlink())
    found = [stage / part for part in parts for stage in stages]
    return [path for path in found if os.path.lexists(path)]


def _everything(run_dir: Path) -> list[Path]:
    """Return all that lies in the folder; what makes it a run comes last, so that a kill leaves one to remove again."""
    return sorted(run_dir.iterdir(), key=lambda path: (path.name == CONFIG_FILE, path.name))


def _show(console: Console, run_dir: Path, targets: list[Path]) -> None:
    rows = [(str(target.relative_to(run_dir)), in_words(size_of(target))) for target in targets]
    rows.append(("all", in_words(sum(size_of(target) for target in targets))))
    print_table(console, f"To be removed from {run_dir}", ("what", ">size"), rows)


def _warn(console: Console, run_dir: Path, *, whole: bool) -> None:
    """Print what is lost beside the files."""
    if whole:
        print_line(
            console,
            "MLflow keeps what the run has logged; registered model versions whose files lie in this folder lose them",
        )
        return
    record = read_record(run_dir)
    if record is not None and not (run_dir / "stages" / record.stage_keys["train"] / RESULT_FILE).exists():
        print_line(console, "training has not finished: without its checkpoints it starts over")


def _check_forks(run_dir: Path) -> None:
    """Refuse to remove checkpoints from which another run of the same folder has yet to start.

    Raises:
        ConfigError: There is such a run.
    """
    for other in list_runs(run_dir.parent):
        record = None if other == run_dir else read_record(other)
        if record is None:
            continue
        for stage in STARTING:
            start, result = record.start_of(stage), other / "stages" / record.stage_keys[stage] / RESULT_FILE
            if start is None or result.exists():
                continue
            if start.in_run(other).stage_dir.resolve().is_relative_to(run_dir.resolve()):
                raise ConfigError(
                    f"run {other.name} starts from a checkpoint of run {run_dir.name}; let it finish first"
                )


def _ask(name: str) -> None:
    """Ask whether to go on.

    Raises:
        ConfigError: There is nobody to ask.
        typer.Abort: The answer is no.
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"run {name}: nobody can be asked here; --yes removes without asking")
    typer.confirm("Remove this?", abort=True)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder, without following links; each file counts once."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            state = Path(folder, name).lstat()
            seen[state.st_dev, state.st_ino] = state.st_size
    return sum(seen.values())


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with everything in it. What a link points to stays."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def in_words(size: float) -> str:
    """Return a number of bytes in words, such as `1.5 GiB`."""
    unit = 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {UNITS[unit]}" if unit == 0 else f"{size:.1f} {UNITS[unit]}"
