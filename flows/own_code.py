"""Go on with the code that a run was started with: replace this process by one that imports the run's copy of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm.access import check_access, check_code
from slurm.backend import JobError
from slurm.environment import ROOT, job_environment, present_code
from specrl.config import ConfigError
from specrl.lineage.record import CODE_DIR, code_of
from specrl.report.results import readable_config

GUARD = "SPECRL_RUN_CODE"
"""The variable with the digest of the code by which a process was replaced."""


def command_with_own_code(run_dir: Path, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]] | None:
    """Return the command and the environment that run `specrl ARGUMENTS` with the run's own code.

    Returns:
        None where this process already has that code, and for a run that has none yet.

    Raises:
        ConfigError: The copy of the run's code is gone or is not what was copied, Python does not import it, or
            somebody else could change it.
    """
    check_access(run_dir, readable_config(run_dir).cluster)
    code = code_of(run_dir)
    if code is None:
        return None
    folder = run_dir / CODE_DIR / code
    if folder.resolve() == ROOT.resolve() or code == present_code():
        return None
    check_code(folder)
    if os.environ.get(GUARD) == code:
        raise ConfigError(f"run {run_dir.name}: Python imports {ROOT} in place of {folder}; look at PYTHONPATH")
    return [sys.executable, "-m", "flows.cli", *arguments], {**os.environ, **job_environment(folder), GUARD: code}


def continue_with_own_code(run_dir: Path, arguments: Sequence[str]) -> None:
    """Replace this process by `specrl ARGUMENTS` with the run's own code, unless it has that already.

    Raises:
        ConfigError: See `command_with_own_code`.
    """
    found = command_with_own_code(run_dir, arguments)
    if found is not None:
        command, environment = found
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(command[0], command, environment)


def resume_with_own_code(run_dir: Path) -> None:
    """Resume a run in a process of its own, with the run's code.

    Raises:
        JobError: The process failed; its own line about that is on standard error.
    """
    arguments = ["resume", str(run_dir)]
    command, environment = command_with_own_code(run_dir, arguments) or (
        [sys.executable, "-m", "flows.cli", *arguments],
        dict(os.environ),
    )
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise JobError(f"specrl resume {run_dir} failed with exit code {code}")
