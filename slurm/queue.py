"""Slurm's commands, and the list of a user's jobs, for which all flows on a host ask Slurm once."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from slurm.backend import JobError, SilentSchedulerError
from specrl.artifacts import digest, write_text
from specrl.processes import node_folder, slurm_environment

COMMAND_SECONDS = 30
"""How long one of Slurm's commands may take before Slurm counts as silent."""
PRESENT_SECONDS = 1.0
"""How old a list may be that still counts as the present one: no flow that was killed is back within that time."""


@dataclass(frozen=True)
class Listed:
    """A job of the user that is in the queue, or has just ended."""

    job_id: str
    word: str
    """Slurm's word for its state."""
    reason: str
    """Why it waits."""
    name: str


def listed(max_age: float) -> list[Listed]:
    """The user's jobs, as squeue listed them at most `max_age` seconds ago for any flow on this host."""
    path = _shared_list()
    try:
        with FileLock(path.with_suffix(".lock"), timeout=2 * COMMAND_SECONDS):
            text = _read(path, max_age)
            if text is None:
                text = ask("squeue", "-h", "--me", "-t", "all", "-o", "%i|%T|%r|%j")
                write_text(path, text)
    except Timeout as error:
        raise SilentSchedulerError("another flow on this host waits for squeue") from error
    rows = [line.strip().split("|", 3) for line in text.splitlines()]
    return [Listed(*row) for row in rows if len(row) == 4]


def forget() -> None:
    """Have the next one who wants the list ask Slurm, because a job is being submitted."""
    _shared_list().unlink(missing_ok=True)


def _shared_list() -> Path:
    cluster = digest([shutil.which("squeue"), os.environ.get("SLURM_CONF")])
    return node_folder() / f"squeue-{cluster}"


def _read(path: Path, max_age: float) -> str | None:
    try:
        age = time.time() - path.stat().st_mtime
        return path.read_text() if 0 <= age <= max_age else None  # a clock that was set back makes it one of the future
    except FileNotFoundError:
        return None


def ask(*command: str, seconds: float = COMMAND_SECONDS) -> str:
    """The output of a command of Slurm's, in a neutral environment; a SilentSchedulerError if it fails or is slow."""
    try:
        done = subprocess.run(
            command, env=slurm_environment(), capture_output=True, text=True, timeout=seconds, check=False
        )
    except FileNotFoundError as error:
        if command[0] == "sacct":
            raise SilentSchedulerError("no sacct") from error
        raise JobError(f"{command[0]} is not installed: --cluster slurm works where Slurm's commands are") from error
    except subprocess.TimeoutExpired as error:
        raise SilentSchedulerError(f"{command[0]} took more than {seconds:g} s") from error
    if done.returncode:
        said = done.stderr.strip().removeprefix(f"{command[0]}: error: ")
        raise SilentSchedulerError(f"{command[0]}: {said or done.returncode}")
    return done.stdout + (done.stderr if "--test-only" in command else "")  # where sbatch prints its answer
