"""Which packages are entered by the calls of a command and of the processes that it starts.

A folder with a `sitecustomize.py` comes first on their import path, which every Python imports as it starts. To import
a module does not enter its package, and neither do the calls that importing it makes.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

SOURCES = ("flows", "tasks", "slurm", "specrl", "tests")
FILE = "SPECRL_CALLS_FILE"
"""The variable with the path of the file that gets a line for the first call of each process into each package."""


class Call(NamedTuple):
    time: float
    process: int
    package: str
    function: str


def recording(folder: Path) -> dict[str, str]:
    """The variables with which a command and all that it starts record their calls, to be read with `read_calls`."""
    (folder / "sitecustomize.py").write_text("from tests.calls import record\n\nrecord()\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}", FILE: str(folder / "calls.txt")}


def read_calls(folder: Path) -> list[Call]:
    rows = [line.split() for line in (folder / "calls.txt").read_text().splitlines()]
    return sorted(Call(float(at), int(process), package, function) for at, process, package, function in rows)


def record() -> None:
    entered: set[str] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # as the bodies of modules and classes
            return
        spec = frame.f_globals.get("__spec__")
        module = spec.name if spec is not None else ""  # of a module that is run, too, whose name is `__main__`
        package = module if "__path__" in frame.f_globals else module.rpartition(".")[0]
        if module.partition(".")[0] not in SOURCES or package in entered or _is_importing(frame):
            return
        entered.add(package)
        with Path(os.environ[FILE]).open("a") as file:
            file.write(f"{time.monotonic()} {os.getpid()} {package} {module}:{frame.f_code.co_qualname}\n")

    threading.setprofile(look)
    sys.setprofile(look)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals["__name__"] != "__main__":
            return True
        frame = frame.f_back
    return False
