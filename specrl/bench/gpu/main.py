"""`specrl bench gpu`: run the sections one after another, and write the page after each of them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from specrl.artifacts import write_json
from specrl.bench.gpu.findings import NEEDS_GPU, Record
from specrl.bench.gpu.imports import missing
from specrl.bench.gpu.models import TINY, scale_of
from specrl.bench.gpu.page import write_page
from specrl.bench.gpu.sections import SECTIONS, Section
from specrl.bench.job import BenchJob, say
from specrl.bench.settings import GpuSettings


def main(job: BenchJob) -> None:
    """Run all sections that are asked for and not done yet, and write the page and the JSON file.

    Raises:
        SystemExit: A section failed; the page says which and why.
    """
    import torch

    settings = GpuSettings.model_validate(job.settings)
    scale = scale_of(tiny=settings.tiny)
    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    folder = job.run_dir / f"{device}-{scale.name}"
    if settings.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * settings.minutes
    earlier = {section.name: Record.load(folder, section.name) for section in SECTIONS}
    records = {name: record for name, record in earlier.items() if record is not None}
    for section in SECTIONS:
        if settings.sections and section.name not in settings.sections:
            continue
        record = _record_of(section, folder, scale.name, end, has_gpu=torch.cuda.is_available())
        records[section.name] = record
        say(f"{section.name}: {record.status}, {record.seconds:.0f} s{': ' if record.error else ''}{record.error}")
        shown = [records[section.name] for section in SECTIONS if section.name in records]
        write_json(job.json_path, [asdict(record) for record in shown])
        write_page(job, shown, scale)
    if failed := [name for name, record in records.items() if record.status == "failed"]:
        raise SystemExit(f"sections that failed: {', '.join(failed)}; the page has the others: {job.page}")


def _record_of(section: Section, folder: Path, scale: str, end: float, *, has_gpu: bool) -> Record:
    """Return the record of a section, from an earlier call of the command if that has finished it."""
    done = Record.load(folder, section.name)
    if done is not None and done.status == "done":
        return done
    if section.needs_gpu and not has_gpu:
        return Record(section.name, NEEDS_GPU, error="nothing of it can be measured on a CPU")
    if absent := missing(section.imports):
        return Record(section.name, "missing", error=f"not installed: {', '.join(absent)}")
    limit = end - time.monotonic()
    if scale != TINY.name:
        limit = min(limit, 60 * section.minutes)
    if limit <= 0:
        return Record(section.name, "failed", error="no time was left; the same command goes on from here")
    return _run(section, folder, scale, limit)


def _run(section: Section, folder: Path, scale: str, limit: float) -> Record:
    """Run a section in a process group of its own, and return its record."""
    log, started = folder / f"{section.name}.log", time.monotonic()
    command = [sys.executable, "-m", "specrl.bench.gpu.sections", str(folder), section.name, scale, str(os.getpid())]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        code = process.wait(limit)
        reason = _reason(log)
    except subprocess.TimeoutExpired:
        code, reason = -1, f"it took longer than {limit / 60:.1f} minutes"
    with contextlib.suppress(ProcessLookupError):  # what it has started ends with it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    seconds, record = time.monotonic() - started, Record.load(folder, section.name)
    if code == 0 and record is not None:
        record.seconds = seconds
        record.save(folder)
        return record
    return Record(section.name, "failed", seconds, f"{reason} (log: {log})")


def _reason(log: Path) -> str:
    """Return the last error that a section has printed, or else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[\w+\]: )?[\w.]*(Error|Exception|Exit)\b", line)]
    return (errors or lines or ["it said nothing"])[-1]
