"""Check what this machine can run, and say how to fix what is missing. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from email import message_from_string
from importlib.metadata import distributions
from pathlib import Path

import psutil
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.text import Text

from specrl.checks import Check, gpu
from specrl.checks.file_systems import existing, file_system, has_locks, is_shared, prefect_home, shared_database
from specrl.config import Config, ConfigError, TrackingConfig
from specrl.data.rewards import sandbox
from specrl.processes import output_of, slurm_environment
from specrl.report.tables import print_line, print_table
from specrl.tracking import store

QUICKSTART_MEMORY_GIB = 16  # needed by `configs/quickstart.toml`
QUICKSTART_DISK_GIB = 5  # needed by `configs/quickstart.toml` once the packages are installed
PROBE_SECONDS = 10  # the longest wait for nvidia-smi or a service
LOCKS = Path(__file__).parents[2] / "requirements"
SHOWN = 5  # packages named in a line
_DEVELOPERS = """pytest pytest-xdist hypothesis ruff mypy import-linter vulture peft
ast-serialize execnet grimp iniconfig librt mypy-extensions sortedcontainers"""
DEVELOPERS = _DEVELOPERS.split()
"""Packages that only `dev.in` brings into the locks: a machine without them runs everything but the tests."""
APT = "apt-get install --no-install-recommends"
CLIENT = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol")
FROM_FILES = "until then, job states come from squeue and from files"
SYSTEM_PATHS = "/usr/local/sbin:/usr/sbin:/sbin"


def checks(runs_dir: Path = Path("runs"), tracking_uri: str | None = None) -> list[Check]:
    """All findings in display order; takes a few seconds and leaves no file behind."""
    gpus, needs = _gpus(), gpu.GpuNeeds(transformer_engine=True, fp8_generation=True)
    for_gpus = bool(gpus) or gpu.cuda_of_build(gpu.torch_for_gpus()) is not None
    return [
        check_cores(),
        check_memory(),
        check_disk(runs_dir),
        check_locks(runs_dir),
        check_sandbox(),
        check_gpu(gpus),
        *(gpu.gpu_checks(gpu.gather_facts(use_torch=False), needs) if gpus else []),
        check_packages(LOCKS / ("gpu.lock" if for_gpus else "cpu.lock")),
        *check_torch(Path(sysconfig.get_path("purelib"))),
        *check_slurm(),
        check_mlflow(runs_dir, tracking_uri),
        check_prefect_home(runs_dir),
    ]


def exit_code(found: Iterable[Check]) -> int:
    """1 if a check failed; warnings do not count."""
    return int(any(check.status == "fail" for check in found))


def render(found: list[Check], console: Console | None = None) -> None:
    """Print the findings as a table, followed by how to fix what is missing."""
    styles = {"ok": "green", "warn": "yellow", "fail": "red"}
    rows = [(check.name, Text(check.status, styles[check.status]), check.found) for check in found]
    print_table(f"specrl on Python {sys.version.split()[0]}", ("check", "status", "found"), rows, console)
    for check in found:
        if check.fix:
            print_line(f"{check.name}: {check.fix}", console)


def check_cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    if cores >= 2:
        return Check("cores", "ok", str(cores))
    return Check("cores", "warn", str(cores), "train on one rank: --set stage_resources.train.ranks_per_node=1")


def check_memory() -> Check:
    total = psutil.virtual_memory().total / gpu.GIB
    if total >= QUICKSTART_MEMORY_GIB:
        return Check("memory", "ok", f"{total:.0f} GiB")
    fix = f"the quickstart needs {QUICKSTART_MEMORY_GIB} GiB; configs/smoke.toml needs less"
    return Check("memory", "warn", f"{total:.0f} GiB", fix)


def check_disk(runs_dir: Path) -> Check:
    """Check for free space: a full disk would stop a run half-way."""
    folder = existing(runs_dir)
    if not os.access(folder, os.W_OK):
        return Check("disk", "fail", f"{folder} cannot be written", "--set runs_dir=FOLDER puts the runs elsewhere")
    free = shutil.disk_usage(folder).free / gpu.GIB
    if free >= QUICKSTART_DISK_GIB:
        return Check("disk", "ok", f"{free:.0f} GiB free in {folder}")
    fix = f"free {QUICKSTART_DISK_GIB} GiB, or --set runs_dir=FOLDER puts the runs elsewhere"
    return Check("disk", "fail" if free < 1 else "warn", f"{free:.1f} GiB free in {folder}", fix)


def check_locks(runs_dir: Path) -> Check:
    """Check that a flow can lock a run in the file system of the runs folder."""
    folder = existing(runs_dir)
    kind = file_system(folder) or "unknown"
    if not os.access(folder, os.W_OK) or has_locks(folder):
        return Check("file system", "ok", f"{kind}, which several hosts share" if is_shared(folder) else kind)
    fix = "mount it with flock, or --set runs_dir=FOLDER; else two flows can work on one run"
    return Check("file system", "fail", f"{kind} without locks", fix)


def check_sandbox() -> Check:
    """Check that the kernel can confine a reward, and whatever a response makes it do, to its own folder."""
    held = sandbox.available()
    landlock, filters = f"Landlock {held.landlock}" if held.landlock else "", "seccomp" if held.filters else ""
    found = ", ".join(filter(None, ["namespaces" if held.namespaces else "", landlock, filters])) or "none"
    gaps = held.gaps(network=False)
    if not gaps:
        return Check("reward sandbox", "ok", found)
    fix = f"a reward of your own could {gaps}; ask for a kernel with Landlock, or for user namespaces"
    return Check("reward sandbox", "warn", found, fix)


def check_gpu(gpus: list[str]) -> Check:
    """List the driver's GPUs; none is fine."""
    if gpus:
        return Check("GPU", "ok", "; ".join(gpus))
    if shutil.which("nvidia-smi"):
        return Check("GPU", "warn", "nvidia-smi lists none", "nvidia-smi -L shows why; until then, runs use the CPU")
    return gpu.check_without_driver(gpu.torch_for_gpus())


def _gpus() -> list[str]:
    query = "--query-gpu=name,memory.total,driver_version"
    return (output_of("nvidia-smi", query, "--format=csv,noheader", seconds=PROBE_SECONDS) or "").splitlines()


def read_pins(lock: Path) -> dict[str, str]:
    """The versions in a lock; empty without one, as in an installation without the project's folder."""
    if not lock.is_file():
        return {}
    pins = (re.match(r"([A-Za-z0-9._-]+)={2,3}([^\s;=]+)", line) for line in lock.read_text().splitlines())
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def whole_packages() -> dict[str, str]:
    """The versions of the packages that Python would import, by canonical name.

    Folders with missing, truncated or binary metadata, which an interrupted pip leaves, are skipped.
    """
    found: dict[str, str] = {}
    for package in distributions():
        with contextlib.suppress(ValueError):
            known = message_from_string(package.read_text("METADATA") or package.read_text("PKG-INFO") or "")
            if known["Name"] and known["Version"]:
                # Of duplicates, Python imports the first.
                found.setdefault(canonicalize_name(known["Name"]), known["Version"])
    return found


def check_packages(lock: Path) -> Check:
    """Compare installed with locked versions, ignoring local version labels such as `+cpu`."""
    pins, installed, fix = read_pins(lock), whole_packages(), f"make env LOCK=requirements/{lock.name}"
    if missing := [name for name in pins if name not in installed and name not in DEVELOPERS]:
        return Check("packages", "fail", f"of {lock.name}, there is no {_some(missing)}", fix)
    other = [name for name, pin in pins.items() if installed.get(name, "").partition("+")[0] != pin.partition("+")[0]]
    if other:
        words = _some([f"{name} {installed.get(name, '(missing)')}, locked is {pins[name]}" for name in other])
        return Check("packages", "warn", f"of {lock.name}, others are installed: {words}", fix)
    return Check(
        "packages", "ok", f"the {len(pins)} of {lock.name} in their locked versions" if pins else "no lock here"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def check_torch(site_packages: Path) -> list[Check]:
    """Report a torch built for another CUDA version than the lock's, which torch's version may not show."""
    wanted, source = whole_packages().get("cuda-toolkit"), site_packages / "torch" / "version.py"
    if wanted is None or not source.is_file():
        return []
    found = re.search(r"^cuda\b.*= '([\d.]+)'", source.read_text(), re.MULTILINE)
    if found and wanted.startswith(f"{found[1]}."):
        return []
    build = f"CUDA {found[1]}" if found else "CPUs"
    return [Check("torch", "fail", f"built for {build}, not for CUDA {wanted}", "make clean, then make env")]


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
