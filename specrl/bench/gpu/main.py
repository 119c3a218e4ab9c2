"""`specrl bench gpu`: run the sections one after another, each in a process of its own, which saves row by row.

`python -m specrl.bench.gpu.main FOLDER SECTION SCALE PARENT` is the process of a section.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from specrl.bench.gpu.models import FULL, SCALES, SHORT
from specrl.bench.job import BenchJob, say
from specrl.bench.options import GpuOptions
from specrl.bench.pages import hardware, table, write_results
from specrl.processes import end_with_parent

SECTIONS = {"exactness": ("Token-for-token exactness", 10), "generation": ("Stock vLLM and speculation", 15)}
"""The functions of `engines` that yield rows, in the order of their worth, with titles and the most minutes on a GPU."""


def main(job: BenchJob) -> None:
    """Run all sections that are asked for and not done yet, and write rows and page after each.

    Raises:
        SystemExit: A section failed; the page says which and why.
    """
    import torch

    options = TypeAdapter(GpuOptions).validate_python(job.options)
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
    minutes = SECTIONS[name][1] if has_gpu else None
    if done.exists():
        return done.read_text()
    (folder / f"{name}.jsonl").unlink(missing_ok=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "specrl.bench.gpu.main", str(folder), name, scale, str(os.getpid())]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        code = process.wait(minutes and 60 * minutes)
    except subprocess.TimeoutExpired:
        code = -1
    with contextlib.suppress(ProcessLookupError):  # what it has started ends with it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if code == 0:
        done.write_text(f"done in {time.monotonic() - started:.0f} s")
        return done.read_text()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["it said nothing"]
    reason = lines[-1] if code != -1 else f"it took longer than {minutes} minutes"
    return f"failed: {reason} (log: {log})"


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read what a section has saved, whether it has ended or not."""
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(job: BenchJob, scale: str, states: dict[str, str], folder: Path) -> None:
    """Write the rows and the page of the sections that have been run so far."""
    import torch

    from specrl.bench.gpu import engines

    rows, sections = [], [f"Sizes: {scale}. All models are random. Every section ran in a process of its own."]
    for name, state in states.items():
        found, about = read_rows(folder, name), getattr(engines, name).__doc__
        columns = dict.fromkeys(column for row in found for column in row)
        sections.append(f"## {SECTIONS[name][0]}\n\n{' '.join(about.split())}\n\n**{state}**")
        sections += [table(found, {column.replace("_", " "): column for column in columns})] if found else []
        rows += [{"section": name, **row} for row in found] + [{"section": name, "status": state}]
    write_results(job, rows, "A first look at a GPU", sections, hardware(torch.get_num_threads()))


def measure_section(folder: Path, name: str, scale: str) -> None:
    """Run one section in this process, and save each row as soon as it is there."""
    from specrl.bench.gpu import engines

    with (folder / f"{name}.jsonl").open("w") as file:
        for row in getattr(engines, name)(SCALES[scale], folder):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[4]))
    measure_section(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
