"""The note a job leaves in the run's folder: `jobs/KEY.json` says which job runs, or ran, the stage with that key."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from specrl.artifacts import write_json


@dataclass(frozen=True)
class Record:
    backend: Literal["local", "slurm"]
    job_id: str
    started: int | None
    """Start time of a local job's process in clock ticks since boot: with the id it names one process for good."""
    host: str
    submitted_at: float
    """Unix seconds."""


def record_path(run_dir: Path, key: str) -> Path:
    return run_dir / "jobs" / f"{key}.json"


def jobs_dir(run_dir: Path, key: str) -> Path:
    """Folder of the stage's job files: what it was given, logs per rank, submitit's pickles."""
    return run_dir / "jobs" / key


def write_record(path: Path, record: Record) -> None:
    write_json(path, asdict(record))


def read_record(path: Path) -> Record | None:
    try:
        return Record(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; none when it is gone or waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, started = fields[0], int(fields[19])
    return None if state in "ZX" else started


def is_alive(record: Record) -> bool:
    """Whether the local process of the record lives on this host."""
    return record.started is not None and start_ticks(int(record.job_id)) == record.started
