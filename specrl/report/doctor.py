"""What this machine can run and what is missing, each with the line that mends it. Imports nothing heavy."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specrl.report import doctor_machine, doctor_packages, doctor_services
from specrl.report.check import Check
from specrl.report.tables import print_line, print_table


def checks(runs_dir: Path = Path("runs"), tracking_uri: str | None = None) -> list[Check]:
    """Everything that is looked at, in the order it is shown. Seconds at most; nothing that it writes stays."""
    return [
        *doctor_machine.checks(runs_dir),
        *doctor_packages.checks(gpu=doctor_machine.has_gpu()),
        *doctor_services.checks(runs_dir, tracking_uri),
    ]


def exit_code(found: Iterable[Check]) -> int:
    """1 when a check failed, else 0; warnings do not count."""
    return int(any(check.status == "fail" for check in found))


def render(found: list[Check], console: Console | None = None) -> None:
    """Print the checks as a table, then every line that mends something."""
    console = console or Console()
    styles = {"ok": "green", "warn": "yellow", "fail": "red"}
    rows = [(check.name, Text(check.status, styles[check.status]), check.found) for check in found]
    print_table(console, f"specrl on Python {sys.version.split()[0]}", ("check", "status", "found"), rows)
    for check in found:
        if check.mend:
            print_line(console, f"{check.name}: {check.mend}")
