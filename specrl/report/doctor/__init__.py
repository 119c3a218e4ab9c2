"""Check what this machine can run, and say how to fix what is missing. Imports nothing heavy."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specrl.checks import Check, gpu
from specrl.report.doctor import machine, packages, services
from specrl.report.tables import print_line, print_table


def checks(runs_dir: Path = Path("runs"), tracking_uri: str | None = None) -> list[Check]:
    """All findings in display order; takes a few seconds and leaves no file behind."""
    has_gpu = machine.has_gpu()
    needs = gpu.GpuNeeds(transformer_engine=True, fp8_generation=True)
    return [
        *machine.checks(runs_dir),
        *(gpu.gpu_checks(gpu.gather_facts(use_torch=False), needs) if has_gpu else []),
        *packages.checks(gpu=has_gpu or gpu.cuda_of_build(gpu.torch_for_gpus()) is not None),
        *services.checks(runs_dir, tracking_uri),
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
