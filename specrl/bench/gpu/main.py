"""`specrl bench gpu`: each section runs in its own process and saves row by row; the page shows all measured so far.

Sections need separate processes because vLLM enables batch-invariant kernels for a whole process.
"""

from __future__ import annotations

import json
import time
from importlib import import_module
from typing import Any

import torch

from specrl.artifacts import write_text
from specrl.bench.gpu.models import FULL, SHORT
from specrl.bench.job import BenchJob, say
from specrl.bench.options import GPU_SECTIONS, GpuOptions
from specrl.bench.pages import table, titled, write_results

MODULES = {"invariance": "exactness", "drafter": "training"}  # of sections that share one


def measure_of(section: str) -> Any:
    """The function that measures a section; only its module is imported, so that others may be broken."""
    module = import_module(f"specrl.bench.gpu.{MODULES.get(section, section)}")
    if section == "drafter":
        return module.measure_drafter
    return module.measure_invariance if section == "invariance" else module.measure


def main(job: BenchJob, options: GpuOptions) -> None:
    """Measure a section, unless an earlier call has, and write the rows and the page of all sections so far."""
    scale = SHORT if options.short or not torch.cuda.is_available() else FULL
    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    folder = job.folder / f"{device}-{scale.name}"
    folder.mkdir(parents=True, exist_ok=True)
    done, started = folder / f"{options.section}.done", time.monotonic()
    if not done.exists():
        measure = measure_of(options.section)
        write_text(folder / f"{options.section}.about", " ".join((measure.__doc__ or "").split()))
        with (folder / f"{options.section}.jsonl").open("w") as file:
            for row in measure(scale, folder):
                file.write(json.dumps(row) + "\n")
                file.flush()
        write_text(done, f"done in {time.monotonic() - started:.0f} s")
    say(f"{options.section}: {done.read_text()}")
    rows: list[dict[str, Any]] = []
    sections = [f"Sizes: {scale.name}. All models are random. Every section ran in a process of its own."]
    for name in GPU_SECTIONS:
        path, state = folder / f"{name}.jsonl", folder / f"{name}.done"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        status = state.read_text() if state.exists() else f"not finished; log: {job.folder / name}.log"
        about, columns = folder / f"{name}.about", dict.fromkeys(column for row in found for column in row)
        sections.append(f"## {name.capitalize()}\n\n{about.read_text() if about.exists() else ''}\n\n**{status}**")
        sections += [table(found, titled(*columns))] if found else []
        rows += [{"section": name, **row} for row in found] + [{"section": name, "status": status}]
    write_results(job, rows, "A first look at a GPU", sections)
