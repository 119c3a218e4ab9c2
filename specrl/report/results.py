"""The results of a run's stages, finished or not, as the summary and the report page read them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specrl.artifacts import RESULT_FILE, ResultType, read_json, read_result
from specrl.config import STAGES, Config, parse_config, understood_config
from specrl.lineage.record import RUN_FILE, readable_keys

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class StageRecord:
    """A stage of a run."""

    key: str
    stage_dir: Path
    seconds: float | None = None  # None: read from the stage's result
    job_id: str | None = None  # a Slurm job or local process; None: read from `jobs/KEY.json`


def find_stages(run_dir: Path) -> dict[str, StageRecord]:
    """The folder of each stage that has one: that of its key in `run.json` or, without such a record, the newest one.

    A link is none: the run may be somebody else's.
    """
    stages = run_dir / "stages"
    if stages.is_symlink():
        return {}
    keys = readable_keys(run_dir)
    found: dict[str, StageRecord] = {}
    for stage in STAGES:
        folders = sorted(stages.glob(f"{stage}-*"), key=lambda folder: folder.lstat().st_mtime)
        folders = folders if keys is None else [stages / keys[stage]] if stage in keys else []
        if folders and folders[-1].is_dir() and not folders[-1].is_symlink():
            found[stage] = StageRecord(folders[-1].name, folders[-1])
    return found


def read_config(run_dir: Path) -> Config:
    """The configuration that a run was started with; ValueError where the folder is not a run's."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{run_dir} is not the folder of a run: no config.json; `specrl ls` lists runs")
    return parse_config(json.loads(path.read_text()))


def readable_config(run_dir: Path) -> Config:
    """What is understood of a configuration, perhaps of somebody else or another version, and defaults for the rest."""
    record = read_json(run_dir / RUN_FILE)
    settings = record.get("settings") if isinstance(record, dict) else None
    data = settings if isinstance(settings, dict) else read_json(run_dir / CONFIG_FILE)
    return understood_config(data if isinstance(data, dict) else {}, run_dir)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's; a model's folder has a file of the name `config.json`, too."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    if (folder / RUN_FILE).is_file():
        return True
    data = read_json(folder / CONFIG_FILE)
    return isinstance(data, dict) and {"name", "runs_dir"} <= data.keys()


def readable(stages: Mapping[str, StageRecord], stage: str, kind: type[ResultType]) -> ResultType | None:
    """The stage's result, or None if it has not finished or is of another version of specrl."""
    try:
        return finished(stages, stage, kind)
    except ValueError:
        return None


def finished(stages: Mapping[str, StageRecord], stage: str, kind: type[ResultType]) -> ResultType | None:
    """The stage's result, or None if it has not finished."""
    record = stages.get(stage)
    if record is None or not (record.stage_dir / RESULT_FILE).exists():
        return None
    return read_result(record.stage_dir, kind)


def seconds_of(record: StageRecord) -> float | None:
    """The wall-clock time of a stage, or None if it has not finished."""
    if record.seconds is not None:
        return record.seconds
    found = read_json(record.stage_dir / RESULT_FILE)
    seconds = found.get("seconds") if isinstance(found, dict) else None
    return float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else None


def job_id_of(run_dir: Path, record: StageRecord) -> str | None:
    """The Slurm job or the local process of a stage, if known."""
    if record.job_id is not None:
        return record.job_id
    found = read_json(run_dir / "jobs" / f"{record.key}.json")
    job_id = found.get("job_id") if isinstance(found, dict) else None
    return None if job_id is None else str(job_id)


def finished_steps(stages: Mapping[str, StageRecord]) -> int:
    """The RL steps whose rollouts are written."""
    if "train" not in stages:
        return 0
    return sum(1 for _ in (stages["train"].stage_dir / "rollouts").glob("step=*"))
