"""Write a benchmark's dated page, with command, machine, tables and charts, and its rows as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specrl.artifacts import write_json, write_text
from specrl.report.processor import bf16_support, cpu_flags, cpu_name

PACKAGES = ("vllm", "torch", "megatron-core")


@dataclass
class Page:
    """A Markdown page of sections in the order in which they are added, with charts that become files beside it."""

    path: Path
    sections: list[str] = field(default_factory=list)
    plots: dict[str, str] = field(default_factory=dict)
    """The SVG text of each chart by its file name."""

    def text(self, paragraph: str) -> None:
        """Add a paragraph."""
        self.sections.append(paragraph.strip())

    def plot(self, name: str, svg: str, caption: str) -> None:
        """Add a chart, which becomes the file PAGE-NAME.svg."""
        file = f"{self.path.stem}-{name}.svg"
        self.plots[file] = svg
        self.sections.append(f"![{caption}]({file})")

    def write(self) -> None:
        """Write the page and its charts."""
        for name, svg in self.plots.items():
            write_text(self.path.with_name(name), svg)
        write_text(self.path, "\n\n".join(self.sections) + "\n")


def default_page(name: str) -> Path:
    """Return `benchmarks/DATE-NAME.md` for today."""
    return Path("benchmarks") / f"{date.today().isoformat()}-{name}.md"


def heading(title: str, command: str, threads: int) -> str:
    """Return the beginning of a page: title, date, command and hardware."""
    return f"# {date.today().isoformat()}: {title}\n\nCommand: `{command}`. Hardware: {hardware(threads)}."


def hardware(threads: int) -> str:
    """Return in words the machine that this process runs on, and the versions of vLLM, torch and Megatron."""
    cores = len(os.sched_getaffinity(0))
    packages = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = f"{cpu_name()} ({bf16_support(cpu_flags())})"
    used = f"{threads} thread{'s' if threads > 1 else ''}"
    return f"{processor}, {cores} cores usable, {used}, {memory:.0f} GiB{_gpu()}; {packages}"


def _version(name: str) -> str | None:
    for distribution in (name, f"{name}-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _gpu() -> str:
    import torch

    return f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows as a JSON list."""
    write_json(path, list(rows))
