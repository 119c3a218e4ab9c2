"""Write a benchmark's page, with command, date, machine, tables and charts, and its rows as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa

from specrl.artifacts import atomic_path, write_json, write_text
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


def heading(title: str, command: str, threads: int) -> str:
    """Return the beginning of a page: title, command, date and hardware."""
    return f"# {title}\n\nCommand: `{command}`. Date: {date.today().isoformat()}. Hardware: {hardware(threads)}."


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
    """Write the rows as a JSON list and, beside it, as an Arrow file, where a column of several types holds JSON."""
    write_json(path, list(rows))
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    with (
        atomic_path(path.with_suffix(".arrow")) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


def _column(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else json.dumps(value) for value in values], pa.string())
