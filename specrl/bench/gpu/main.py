"""`specrl bench gpu`: run the sections one after another, each in a process of its own, which saves row by row.

`python -m specrl.bench.gpu.main FOLDER SECTION SCALE PARENT` is the process of a section.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.bench.gpu.models import FULL, SCALES, SHORT
from specrl.bench.job import BenchJob, say
from specrl.bench.options import GpuOptions
from specrl.bench.pages import hardware, table, write_page, write_rows
from specrl.processes import end_with_parent


@dataclass(frozen=True)
class Section:
    """A part of the benchmark."""

    module: str
    title: str
    minutes: int
    """The longest it may take on a GPU."""
    needs_gpu: bool = False
    """Whether nothing of it can be done without a GPU."""


SECTIONS = {
    "sampler": Section("arithmetic", "Sampler against PyTorch", 2),
    "exactness": Section("engines", "Token-for-token exactness", 10),
    "fp8": Section("arithmetic", "Native FP8 against the emulation", 3),
    "generation": Section("engines", "Generation: stock vLLM against speculation", 15),
    "training": Section("training", "Policy update: throughput and memory", 6),
    "sleep": Section("engines", "Sleep, wake and refit", 4, needs_gpu=True),
}
"""In the order of their worth; the function `NAME` of the module yields the rows."""


def main(job: BenchJob) -> None:
    """Run all sections that are asked for and not done yet, and write rows and page after each.

    Raises:
        SystemExit: A section failed; the page says which and why.
    """
    import torch

    options = GpuOptions(**{**job.options, "sections": tuple(job.options["sections"])})
    scale = SHORT if options.short or not torch.cuda.is_available() else FULL
    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    folder = job.folder / f"{device}-{scale.name}"
    folder.mkdir(parents=True, exist_ok=True)
    states: dict[str, str] = {}
    for name in options.sections or SECTIONS:
        states[name] = run_section(folder, name, scale.name, has_gpu=torch.cuda.is_available())
        say(f"{name}: {states[name]}")
        report(job, scale.name, states, folder)
    if failed := [name for name, state in states.items() if state.startswith("failed")]:
        raise SystemExit(f"sections that failed: {', '.join(failed)}; the page has the others: {job.page}")


def run_section(folder: Path, name: str, scale: str, *, has_gpu: bool) -> str:
    """Run a section in a process group of its own, unless an earlier call has; return its state in words."""
    done, log = folder / f"{name}.done", folder / f"{name}.log"
    if done.exists():
        return done.read_text()
    if SECTIONS[name].needs_gpu and not has_gpu:
        return "needs a GPU"
    (folder / f"{name}.jsonl").unlink(missing_ok=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "specrl.bench.gpu.main", str(folder), name, scale, str(os.getpid())]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        code = process.wait(60 * SECTIONS[name].minutes if has_gpu else None)
    except subprocess.TimeoutExpired:
        code = -1
    with contextlib.suppress(ProcessLookupError):  # what it has started ends with it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if code == 0:
        done.write_text(f"done in {time.monotonic() - started:.0f} s")
        return done.read_text()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["it said nothing"]
    reason = lines[-1] if code != -1 else f"it took longer than {SECTIONS[name].minutes} minutes"
    return f"failed: {reason} (log: {log})"


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read what a section has saved, whether it has ended or not."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(job: BenchJob, scale: str, states: dict[str, str], folder: Path) -> None:
    """Write the rows and the page of the sections that have been run so far."""
    import torch

    rows, sections = [], [f"Sizes: {scale}. All models are random. Every section ran in a process of its own."]
    for name, state in states.items():
        section, found = SECTIONS[name], read_rows(folder, name)
        about = getattr(importlib.import_module(f"specrl.bench.gpu.{section.module}"), name).__doc__
        columns = dict.fromkeys(column for row in found for column in row)
        sections.append(f"## {section.title}\n\n{' '.join(about.split())}\n\n**{state}**")
        sections += [table(found, {column.replace("_", " "): column for column in columns})] if found else []
        rows += [{"section": name, **row} for row in found] + [{"section": name, "status": state}]
    write_rows(job.json_path, rows)
    write_page(job, "A first look at a GPU", sections, hardware(torch.get_num_threads()))


def measure_section(folder: Path, name: str, scale: str) -> None:
    """Run one section in this process, and save each row as soon as it is there."""
    measure = getattr(importlib.import_module(f"specrl.bench.gpu.{SECTIONS[name].module}"), name)
    with (folder / f"{name}.jsonl").open("w") as file:
        for row in measure(SCALES[scale], folder):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[4]))
    measure_section(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
