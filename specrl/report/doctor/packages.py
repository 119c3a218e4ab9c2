"""Check, without importing any, that packages are installed in their locked versions."""

from __future__ import annotations

import contextlib
import re
import sys
import sysconfig
from collections.abc import Iterator
from email import message_from_string
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name

from specrl.checks import Check

LOCKS = Path(__file__).parents[3] / "requirements"
SHOWN = 5  # packages named in a line
_DEVELOPERS = """pytest pytest-xdist hypothesis ruff mypy import-linter vulture peft
ast-serialize execnet grimp iniconfig librt mypy-extensions sortedcontainers"""
DEVELOPERS = _DEVELOPERS.split()
"""Packages that only `dev.in` brings into the locks: a machine without them runs everything but the tests."""


def checks(*, gpu: bool) -> list[Check]:
    """Compare the packages with the lock for GPUs or for CPUs."""
    site_packages = Path(sysconfig.get_path("purelib"))
    lock = LOCKS / ("gpu.lock" if gpu else "cpu.lock")
    return [check_packages(lock), *check_torch(site_packages), check_bytecode(site_packages)]


def read_pins(lock: Path) -> dict[str, str]:
    """The versions in a lock; empty without one, as in an installation without the project's folder."""
    if not lock.is_file():
        return {}
    pins = (re.match(r"([A-Za-z0-9._-]+)={2,3}([^\s;=]+)", line) for line in lock.read_text().splitlines())
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def whole_packages() -> Iterator[tuple[str, str]]:
    """The versions of the packages that Python would import.

    Folders with missing, truncated or binary metadata, which an interrupted pip leaves, are skipped.
    """
    for package in distributions():
        with contextlib.suppress(ValueError):
            known = message_from_string(package.read_text("METADATA") or package.read_text("PKG-INFO") or "")
            if known["Name"] and known["Version"]:
                yield known["Name"], known["Version"]


def check_packages(lock: Path) -> Check:
    """Compare installed with locked versions, ignoring local version labels such as `+cpu`."""
    pins, fix = read_pins(lock), f"make env LOCK=requirements/{lock.name}"
    found = reversed(list(whole_packages()))  # of duplicates, Python imports the first
    installed = {str(canonicalize_name(name)): version for name, version in found}
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
    wanted, source = dict(whole_packages()).get("cuda-toolkit"), site_packages / "torch" / "version.py"
    if wanted is None or not source.is_file():
        return []
    found = re.search(r"^cuda\b.*= '([\d.]+)'", source.read_text(), re.MULTILINE)
    if found and wanted.startswith(f"{found[1]}."):
        return []
    build = f"CUDA {found[1]}" if found else "CPUs"
    return [Check("torch", "fail", f"built for {build}, not for CUDA {wanted}", "make clean, then make env")]


def check_bytecode(site_packages: Path) -> Check:
    """Check that bytecode is kept, so that processes need not compile thousands of modules."""
    if any(site_packages.glob("torch/__pycache__/*.pyc")):
        return Check("bytecode", "ok", "kept")
    if not sys.dont_write_bytecode:
        return Check("bytecode", "ok", "kept from the first import on")
    found = "none, and PYTHONDONTWRITEBYTECODE is set: every process compiles what it imports, a rank for 20 s and more"
    return Check("bytecode", "warn", found, f"unset it, or once: {sys.executable} -m compileall -q {site_packages}")
