"""Check the services that a run uses: Slurm, MLflow and Prefect."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from specrl.checks import Check
from specrl.checks.file_systems import existing, file_system, is_shared, prefect_home, shared_database
from specrl.config import Config, ConfigError, TrackingConfig
from specrl.processes import output_of, slurm_environment
from specrl.tracking import store

APT = "apt-get install --no-install-recommends"
CLIENT = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol")
FROM_FILES = "until then, job states come from squeue and from files"
SYSTEM_PATHS = "/usr/local/sbin:/usr/sbin:/sbin"
PROBE_SECONDS = 5  # the longest wait for a service


def checks(runs_dir: Path, tracking_uri: str | None) -> list[Check]:
    return [*check_slurm(), check_mlflow(runs_dir, tracking_uri), check_prefect_home(runs_dir)]


def missing(commands: Iterable[str]) -> list[str]:
    """The commands found neither on PATH nor in the folders of system daemons."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATHS}"
    return [command for command in commands if not shutil.which(command, path=path)]


def check_slurm() -> list[Check]:
    """Check the client commands and, if they exist, accounting, munge and the cluster itself."""
    absent = missing(CLIENT)
    if len(absent) == len(CLIENT):
        fix = f"only for --cluster slurm: {APT} slurm-client munge, or run on a login node"
        return [Check("Slurm", "warn", "no Slurm commands; --cluster local works", fix)]
    if absent:
        return [Check("Slurm", "warn", f"missing {', '.join(absent)}", f"{APT} slurm-client")]
    return [
        Check("Slurm", "ok", _answer("sinfo", "--version") or "commands found"),
        _check_service("Slurm accounting", "sacct", "-n", "-X", "-S", "now", package="slurm-client", fix=FROM_FILES),
        _check_service("munge", "munge", "-n", package="munge", fix="systemctl start munge"),
        _check_cluster(),
    ]


def _check_service(name: str, *command: str, package: str, fix: str) -> Check:
    """Check that a command exists and is answered; `fix` says what to do, or what happens, otherwise."""
    if missing(command[:1]):
        return Check(name, "warn", f"no {command[0]} command", f"{APT} {package}; {fix}")
    if _answer(*command) is None:
        return Check(name, "warn", f"{command[0]} does not answer", fix)
    return Check(name, "ok", f"{command[0]} answers")


def _check_cluster() -> Check:
    nodes = _answer("sinfo", "-h", "-o", "%D %P")
    if nodes:
        return Check("Slurm cluster", "ok", "nodes and partition: " + ", ".join(nodes.split("\n")))
    fix = "set SLURM_CONF to your cluster's slurm.conf"
    return Check("Slurm cluster", "warn", "no controller answers", fix)


def check_mlflow(runs_dir: Path, tracking_uri: str | None) -> Check:
    """Check, as `specrl run` does for a new run, that an MLflow server answers or its database can be opened."""
    if (shared := shared_database(runs_dir, tracking_uri)) is not None:
        words, _, fix = shared.partition(": ")
        return Check("MLflow", "warn", words, fix)
    tracking = TrackingConfig(uri=tracking_uri, experiment="/specrl")  # a path, as Databricks wants them
    config = Config(name="doctor", runs_dir=runs_dir, tracking=tracking)
    try:
        store.check_server(config)
    except ConfigError as error:
        words, _, fix = str(error).partition("; ")
        return Check("MLflow", "fail", words, fix or "correct it, or unset it")
    return Check("MLflow", "ok", store.tracking_uri(config))


def check_prefect_home(runs_dir: Path) -> Check:
    """Check that Prefect's folder is writable, and that no other host writes to it."""
    home = Path(os.environ.get("PREFECT_HOME", prefect_home(runs_dir))).expanduser()
    if is_shared(home):
        found = f"{home} lies on {file_system(home)}, where several hosts damage its database"
        return Check("Prefect", "warn", found, "unset PREFECT_HOME, or name a folder of this machine")
    folder = existing(home)
    if folder.is_dir() and os.access(folder, os.W_OK):
        return Check("Prefect", "ok", str(home))
    return Check("Prefect", "fail", f"{home} cannot be written", "export PREFECT_HOME=FOLDER with another folder")


def _answer(*command: str) -> str | None:
    return output_of(*command, seconds=PROBE_SECONDS, environment=slurm_environment())
