"""Check this machine's cores, memory, disk and accelerators."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil

from specrl.checks import Check
from specrl.checks.file_systems import existing, file_system, has_locks, is_shared
from specrl.checks.gpu import check_without_driver, torch_for_gpus
from specrl.data.rewards import sandbox
from specrl.processes import output_of

GIB = 2**30
QUICKSTART_MEMORY_GIB = 16  # needed by `configs/quickstart.toml`
QUICKSTART_DISK_GIB = 5  # needed by `configs/quickstart.toml` once the packages are installed
PROBE_SECONDS = 10  # for nvidia-smi


def checks(runs_dir: Path) -> list[Check]:
    return [check_cores(), check_memory(), check_disk(runs_dir), check_locks(runs_dir), check_sandbox(), check_gpu()]


def check_cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    if cores >= 2:
        return Check("cores", "ok", str(cores))
    return Check("cores", "warn", str(cores), "train on one rank: --set stage_resources.train.ranks_per_node=1")


def check_memory() -> Check:
    total = psutil.virtual_memory().total / GIB
    if total >= QUICKSTART_MEMORY_GIB:
        return Check("memory", "ok", f"{total:.0f} GiB")
    fix = f"the quickstart needs {QUICKSTART_MEMORY_GIB} GiB; configs/smoke.toml needs less"
    return Check("memory", "warn", f"{total:.0f} GiB", fix)


def check_disk(runs_dir: Path) -> Check:
    """Check for free space: a full disk would stop a run half-way."""
    folder = existing(runs_dir)
    if not os.access(folder, os.W_OK):
        return Check("disk", "fail", f"{folder} cannot be written", "--set runs_dir=FOLDER puts the runs elsewhere")
    free = shutil.disk_usage(folder).free / GIB
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


def has_gpu() -> bool:
    return bool(_gpus())


def check_gpu() -> Check:
    """List the driver's GPUs; none is fine."""
    gpus = _gpus()
    if gpus:
        return Check("GPU", "ok", "; ".join(gpus))
    if shutil.which("nvidia-smi"):
        return Check("GPU", "warn", "nvidia-smi lists none", "nvidia-smi -L shows why; until then, runs use the CPU")
    return check_without_driver(torch_for_gpus())


def _gpus() -> list[str]:
    query = "--query-gpu=name,memory.total,driver_version"
    return (output_of("nvidia-smi", query, "--format=csv,noheader", seconds=PROBE_SECONDS) or "").splitlines()
