"""Benchmarks in MLflow: a run for each cell of a command, all in one experiment, and speedups in a measured run."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specrl.config import Config
from specrl.tracking.runs import FLOW_PATIENCE_SECONDS, RESUME_PATIENCE_SECONDS, Files, last_of, log_artifacts
from specrl.tracking.spool import Spool
from specrl.tracking.store import BENCHMARKS, RUN_ID_FILE, import_mlflow
from specrl.tracking.tracker import SpoolTracker
from specrl.tracking.uploader import send

logger = logging.getLogger(__name__)

ERROR_TAG = "specrl.error"
ODD = re.compile(r"[^\w\-. /]")
"""The characters that names of metrics must not have."""


def benchmark_config(config: Config) -> Config:
    """Replace the experiment of the runs by that of the benchmarks."""
    experiment = f"{config.tracking.experiment}{BENCHMARKS}"
    return config.model_copy(update={"tracking": config.tracking.model_copy(update={"experiment": experiment})})


def log_cell(
    config: Config,
    folder: Path,
    name: str,
    tags: Mapping[str, str],
    params: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    files: Files,
    error: str | None,
) -> None:
    """Record a cell as a run of its own, once; a cell that failed before and now did not goes on with its run.

    Args:
        config: The configuration that `benchmark_config` returned.
        folder: The folder of the cell, where its MLflow run is noted, and where what MLflow misses waits for it.
        rows: What it measured; none if it failed.
        error: Why it failed, in one line; None if it did not.
    """
    import_mlflow()
    spool = Spool(folder)
    if not is_recorded(spool):
        tracker = SpoolTracker(spool, None)
        tracker.start(name, {**tags, ERROR_TAG: error or ""})
        tracker.log_params(params)
        for number, row in enumerate(rows):
            tracker.log_metrics(row_metrics(row), number)
        log_artifacts(tracker, files)
        tracker.end("FINISHED" if error is None else "FAILED")
    if send(config, [folder], FLOW_PATIENCE_SECONDS):
        logger.warning("MLflow is away; the rows of %s are sent when the same command is called again", name)


def is_recorded(spool: Spool) -> bool:
    """Return whether the spool says all there is to say of a cell that has finished."""
    if last_of(spool) != "end":
        return False
    *_, end = (entry for entry in spool.everything() if entry.kind == "end")
    return bool(end.values["status"] == "FINISHED")


def row_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by the names of their metrics."""
    numbers = {column: value for column, value in row.items() if isinstance(value, int | float)}
    return {f"bench/{ODD.sub('_', column)}": float(value) for column, value in numbers.items()}


def log_speedups(config: Config, metrics: Mapping[str, float]) -> None:
    """Log speedups to the MLflow run of the run that was measured; one that MLflow does not know is left alone."""
    if not metrics or not (config.run_dir / RUN_ID_FILE).exists():
        return
    import_mlflow()
    SpoolTracker(Spool(config.run_dir), None).log_metrics(metrics)
    if send(config, [config.run_dir], RESUME_PATIENCE_SECONDS):
        logger.warning("MLflow is away; the speedups wait on disk: specrl sync %s", config.name)
