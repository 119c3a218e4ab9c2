"""The results of a run's stages, finished or not, as the summary and the report page read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specrl.artifacts import RESULT_FILE, ResultType, read_result
from specrl.config import STAGES, Config, parse_config
from specrl.lineage.record import read_record

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class StageRecord:
    """A stage of a run, with its content key, its folder and, once they are known, its run time and job."""

    key: str
    stage_dir: Path
    seconds: float | None = None
    """The wall-clock time of the stage; where it is None, it is read from the stage's result."""
    job_id: str | None = None
    """The Slurm job or the local process; where it is None, it is read from `jobs/KEY.json`."""


def find_stages(run_dir: Path) -> dict[str, StageRecord]:
    """Return the folder of each stage that has one, for a reader that is not the run's flow.

    It is the folder of the stage's key in `run.json`, or the newest one in a folder that has no such record.
    """
    record = read_record(run_dir)
    if record is not None:
        places = ((stage, run_dir / "stages" / key) for stage, key in record.stage_keys.items())
        return {stage: StageRecord(folder.name, folder) for stage, folder in places if folder.is_dir()}
    found: dict[str, StageRecord] = {}
    for stage in STAGES:
        folders = sorted((run_dir / "stages").glob(f"{stage}-*"), key=lambda folder: folder.stat().st_mtime)
        if folders:
            found[stage] = StageRecord(folders[-1].name, folders[-1])
    return found


def read_config(run_dir: Path) -> Config:
    """Return the configuration that a run was started with.

    Raises:
        ValueError: The folder is not a run's.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{run_dir} is not the folder of a run: no config.json; `specrl ls` lists runs")
    return parse_config(json.loads(path.read_text()))


def finished(stages: Mapping[str, StageRecord], stage: str, kind: type[ResultType]) -> ResultType | None:
    """Return the stage's result, or None if it has not finished."""
    record = stages.get(stage)
    if record is None or not (record.stage_dir / RESULT_FILE).exists():
        return None
    return read_result(record.stage_dir, kind)


def seconds_of(record: StageRecord) -> float | None:
    """Return the wall-clock time of a stage, or None if it has not finished."""
    path = record.stage_dir / RESULT_FILE
    if record.seconds is not None or not path.exists():
        return record.seconds
    return float(json.loads(path.read_text())["seconds"])


def job_id_of(run_dir: Path, record: StageRecord) -> str | None:
    """Return the Slurm job or the local process of a stage, or None if it is not known."""
    path = run_dir / "jobs" / f"{record.key}.json"
    if record.job_id is not None or not path.is_file():
        return record.job_id
    job_id = json.loads(path.read_text()).get("job_id")
    return None if job_id is None else str(job_id)


def finished_steps(stages: Mapping[str, StageRecord]) -> int:
    """Return the number of RL steps whose rollouts are written."""
    if "train" not in stages:
        return 0
    return sum(1 for _ in (stages["train"].stage_dir / "rollouts").glob("step=*"))
