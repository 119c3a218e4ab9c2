"""A benchmark's dated page: what was run, on what, its tables and its plot; and the same rows as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specrl.artifacts import write_json, write_text

PACKAGES = ("vllm", "torch", "megatron-core")


@dataclass
class Page:
    """Sections in the order they are added; plots become files beside the page."""

    path: Path
    sections: list[str] = field(default_factory=list)
    plots: dict[str, str] = field(default_factory=dict)
    """File name: SVG."""

    def text(self, paragraph: str) -> None:
        self.sections.append(paragraph.strip())

    def plot(self, name: str, svg: str, caption: str) -> None:
        file = f"{self.path.stem}-{name}.svg"
        self.plots[file] = svg
        self.sections.append(f"![{caption}]({file})")

    def write(self) -> None:
        for name, svg in self.plots.items():
            write_text(self.path.with_name(name), svg)
        write_text(self.path, "\n\n".join(self.sections) + "\n")


def default_page(name: str, folder: Path = Path("benchmarks")) -> Path:
    """`benchmarks/DATE-NAME.md`."""
    return folder / f"{date.today().isoformat()}-{name}.md"


def heading(title: str, command: str, threads: int) -> str:
    """Title, date, command and hardware."""
    return f"# {date.today().isoformat()}: {title}\n\nCommand: `{command}`. Hardware: {hardware(threads)}."


def hardware(threads: int) -> str:
    cores = len(os.sched_getaffinity(0))
    packages = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_processor()}, {cores} cores usable, {threads} threads, {memory:.0f} GiB{_gpu()}; {packages}"


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError

    for distribution in (name, f"{name}-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _gpu() -> str:
    import torch

    return f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"


def write_rows(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows as a JSON list, where one was asked for."""
    if path is not None:
        write_json(path, list(rows))
