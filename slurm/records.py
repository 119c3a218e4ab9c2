"""The note about a stage's job in the run's folder: `jobs/KEY.json` names the job that runs, or last ran, the stage."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from specrl.artifacts import write_json
from specrl.processes import start_ticks


@dataclass(frozen=True)
class Record:
    backend: str
    job_id: str
    started: int | None
    """When a local job's controller started, in clock ticks since boot. None for jobs of other backends."""
    host: str
    submitted_at: float
    """Unix time in seconds."""


def record_path(run_dir: Path, key: str) -> Path:
    """Return where the record of a stage's job lies."""
    return run_dir / "jobs" / f"{key}.json"


def jobs_dir(run_dir: Path, key: str) -> Path:
    """Return the folder of a stage's job files: its context, the logs of its ranks and submitit's pickles."""
    return run_dir / "jobs" / key


def write_record(path: Path, record: Record) -> None:
    write_json(path, asdict(record))


def read_record(path: Path) -> Record | None:
    """Return the record, or None when no job has been submitted for the stage."""
    try:
        return Record(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def is_alive(record: Record) -> bool:
    """Return whether the local process that the record names is alive on this host."""
    return record.started is not None and start_ticks(int(record.job_id)) == record.started
