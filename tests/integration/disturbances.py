"""What tests do to the jobs of a run, and what has become of them."""

from __future__ import annotations

from pathlib import Path

import psutil

from specrl.segments import Segment, read_segments


def ranks_of(run_dir: Path) -> list[int]:
    """Process ids of the ranks that work for a run."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "slurm.entry" in (line := " ".join(process.info["cmdline"] or [])) and str(run_dir) in line
    ]


def train_jobs(run_dir: Path) -> list[Segment]:
    return [segment for folder in run_dir.glob("stages/train-*") for segment in read_segments(folder)]
