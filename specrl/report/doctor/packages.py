"""Check that the locked packages are installed in their locked versions, without importing them."""

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
SHOWN = 5  # packages that a line names
_DEVELOPERS = """pytest pytest-xdist hypothesis ruff mypy import-linter vulture peft
ast-serialize execnet grimp iniconfig librt mypy-extensions sortedcontainers"""
DEVELOPERS = _DEVELOPERS.split()
"""What `dev.in` brings into the locks and nothing else needs: a machine without it runs everything but the tests."""


def checks(*, gpu: bool) -> list[Check]:
    """The findings about the packages, compared with the lock for GPUs or for CPUs."""
    site_packages = Path(sysconfig.get_path("purelib"))
    lock = LOCKS / ("gpu.lock" if gpu else "cpu.lock")
    return [check_packages(lock), *check_torch(site_packages), check_bytecode(site_packages)]


def read_pins(lock: Path) -> dict[str, str]:
    """The versions of a lock; none without one, as in an installation without the project's folder."""
    if not lock.is_file():
        return {}
    pins = (re.match(r"([A-Za-z0-9._-]+)={2,3}([^\s;=]+)", line) for line in lock.read_text().splitlines())
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def whole_packages() -> Iterator[tuple[str, str]]:
    """The packages that Python would import, with their versions.

    A pip that broke off leaves folders whose metadata are missing, cut short or no text: these are passed over.
    """
    for package in distributions():
        with contextlib.suppress(ValueError):
            known = message_from_string(package.read_text("METADATA") or package.read_text("PKG-INFO") or "")
            if known["Name"] and known["Version"]:
                yield known["Name"], known["Version"]


def check_packages(lock: Path) -> Check:
    """Compare the installed packages with their locked versions; local parts of versions (`+cpu`) do not count."""
    pins, fix = read_pins(lock), f"make env LOCK=requirements/{lock.name}"
    found = reversed(list(whole_packages()))  # of two, Python imports the first
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
    """A finding where torch is built for another CUDA than that of the lock, which its version need not say."""
    wanted, source = dict(whole_packages()).get("cuda-toolkit"), site_packages / "torch" / "version.py"
    if wanted is None or not source.is_file():
        return []
    found = re.search(r"^cuda\b.*= '([\d.]+)'", source.read_text(), re.MULTILINE)
    if found and wanted.startswith(f"{found[1]}."):
        return []
    build = f"CUDA {found[1]}" if found else "CPUs"
    return [Check("torch", "fail", f"built for {build}, not for CUDA {wanted}", "make clean, then make env")]


def check_bytecode(site_packages: Path) -> Check:
    """Check that processes need not compile the thousands of modules that they import."""
    if any(site_packages.glob("torch/__pycache__/*.pyc")):
        return Check("bytecode", "ok", "kept")
    if not sys.dont_write_bytecode:
        return Check("bytecode", "ok", "kept from the first import on")
    found = "none, and PYTHONDONTWRITEBYTECODE is set: every process compiles what it imports, a rank for 20 s and more"
    return Check("bytecode", "warn", found, f"unset it, or once: {sys.executable} -m compileall -q {site_packages}")
