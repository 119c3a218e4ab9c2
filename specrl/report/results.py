"""The results of a run's stages, finished or not, for the summary and the report page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrl.artifacts import RESULT_FILE, Artifact, read_json, read_object, read_result
from specrl.config import STAGES, Config, ConfigError, parse_config, understood_config
from specrl.lineage.record import RUN_FILE, read_record, readable_keys, readable_record

CONFIG_FILE = "config.json"


def find_stages(run_dir: Path) -> dict[str, Path]:
    """Find the folder of each stage that has one; the stage's key names it.

    Symbolic links are ignored, because the run may be somebody else's.
    """
    stages = run_dir / "stages"
    if stages.is_symlink():
        return {}
    keys = readable_keys(run_dir)
    found: dict[str, Path] = {}
    for stage in STAGES:
        folders = sorted(stages.glob(f"{stage}-*"), key=lambda folder: folder.lstat().st_mtime)
        folders = folders if keys is None else [stages / keys[stage]] if stage in keys else []
        if folders and folders[-1].is_dir() and not folders[-1].is_symlink():
            found[stage] = folders[-1]
    return found


def read_config(run_dir: Path) -> Config:
    """Read a run's configuration, with its current name and folder; a ConfigError if it cannot be read."""
    record = read_record(run_dir)
    if record is None and not (run_dir / CONFIG_FILE).is_file():
        raise ConfigError(f"{run_dir} is not the folder of a run: no config.json; `specrl ls` lists runs")
    data = record.settings if record is not None else read_json(run_dir / CONFIG_FILE)
    if not isinstance(data, dict):
        raise ConfigError(f"{run_dir / CONFIG_FILE} is damaged; specrl rm {run_dir.name} removes the run")
    return parse_config({**data, "name": run_dir.name, "runs_dir": str(run_dir.parent)})


def readable_config(run_dir: Path) -> Config:
    """Read the configuration of a run that may be somebody else's or of another version, as far as possible.

    Settings that are not understood get their defaults.
    """
    return understood_config(readable_settings(run_dir), run_dir)


def readable_settings(run_dir: Path) -> dict[str, Any]:
    """Read the configuration as written, unchecked; empty if it cannot be read."""
    settings = readable_record(run_dir).get("settings")
    return settings if isinstance(settings, dict) else read_object(run_dir / CONFIG_FILE)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's; models' folders contain a `config.json`, too."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    if (folder / RUN_FILE).is_file():
        return True
    return {"name", "runs_dir"} <= read_object(folder / CONFIG_FILE).keys()


def readable[Result: Artifact](stages: Mapping[str, Path], stage: str, kind: type[Result]) -> Result | None:
    """The stage's result, or None if it has not finished or comes from another version of specrl."""
    try:
        return read_result(stages[stage], kind) if stage in stages else None
    except ValueError:
        return None


def result_of[Result: Artifact](run_dir: Path, stage: str, kind: type[Result]) -> Result:
    """The stage's result; a ConfigError if it has not finished or comes from another version of specrl."""
    folder = find_stages(run_dir).get(stage)
    if folder is None or not (folder / RESULT_FILE).exists():
        raise ConfigError(f"run {run_dir.name} has not finished {stage}; continue it with: specrl resume {run_dir}")
    return read_result(folder, kind)


def seconds_of(stage_dir: Path) -> float | None:
    """A stage's wall-clock seconds, or None if it has not finished."""
    seconds = read_object(stage_dir / RESULT_FILE).get("seconds")
    return float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else None


def job_id_of(run_dir: Path, key: str) -> str | None:
    """The Slurm job or local process of the stage with this key, or None if unknown."""
    job_id = read_object(run_dir / "jobs" / f"{key}.json").get("job_id")
    return None if job_id is None else str(job_id)


def finished_steps(stages: Mapping[str, Path]) -> int:
    """The number of RL steps whose rollouts have been written."""
    if "train" not in stages:
        return 0
    return sum(1 for _ in (stages["train"] / "rollouts").glob("step=*"))
