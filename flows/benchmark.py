"""Benchmarks, in a local process or as jobs: cells run in parallel, each measured once.

A run's benchmark jobs lie in `RUN/bench/cells`, laid out like the stages of a run. Finished cells are not measured
again, whichever command requests them; running jobs are found again, and a failing cell does not affect others.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.folder import only_flow, write_config
from slurm.access import restrict
from slurm.backend import JobError, SilentSchedulerError, StoppedError, forget_stop
from slurm.environment import cache_folders, present_code, process_variables, read_environment_file, snapshot_code
from slurm.failures import last_error
from slurm.submit import backend_of
from specrl.artifacts import RESULT_FILE, digest
from specrl.bench.job import ENTRY, JOB_FILE, PAGE_FILE, BenchJob
from specrl.config import Config, ConfigError, Resources, change_config, parse_config
from specrl.config.cluster import StageResources
from specrl.config.sbatch import asks_for_gpus, names_gpus
from specrl.context import StageContext
from specrl.keys import file_digest, model_fingerprint
from specrl.report.results import find_stages, seconds_of
from specrl.tracking.log import Log
from specrl.tracking.runs import ERROR_TAG, FLOW_PATIENCE_SECONDS, last_of, row_metrics
from specrl.tracking.store import BENCHMARKS, import_mlflow
from specrl.tracking.sync import send
from specrl.tracking.tracker import Tracker
from tasks.display import Reporter
from tasks.run import end_jobs, job_settings, work

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CellJob:
    """A measurement in its own job."""

    label: str  # its name in progress lines and MLflow
    job: BenchJob
    context: StageContext

    @property
    def folder(self) -> Path:
        return self.context.stage_dir

    @property
    def is_finished(self) -> bool:
        return (self.folder / RESULT_FILE).exists()

    def rows(self) -> list[dict[str, Any]]:
        return list(json.loads(self.job.json_path.read_text()))


def make_cell(
    label: str, job: BenchJob, folder: Path, config: Config, trainings: Sequence[Resources], overrides: Sequence[str]
) -> CellJob:
    """Make a benchmark a job with its own folder; `overrides` apply to cluster and resources."""
    made = job_config(config, trainings, folder, overrides)
    key = cell_key(job, place_of(made))
    own = folder / "stages" / key
    context = StageContext(config=made, stage="bench", key=key, stage_dir=own, inputs={}, mlflow_run_id="")
    return CellJob(label, replace(job, page=own / PAGE_FILE, folder=own / "work"), context)


def cell_key(job: BenchJob, place: Mapping[str, Any]) -> str:
    """`bench-` and 12 hex digits that depend on the benchmark, its options and inputs, the code, and where it runs."""
    stages = find_stages(job.run_dir) if job.run_dir is not None else {}
    inputs = {name: stages[name].name for name in ("prepare", "pretrain", "calibrate", "train") if name in stages}
    changes = [change for cell in job.options.get("cells", ()) for change in cell["changes"]]
    read = [_content(change.rpartition("=")[2].strip(' "')) for change in changes]
    return f"bench-{digest([job.name, job.options, read, inputs, present_code(), place, job.changes])}"


def _content(text: str) -> Any:
    path = Path(text).expanduser()
    if not text or not path.exists():
        return None
    return file_digest(path) if path.is_file() else model_fingerprint(str(path))


def place_of(config: Config) -> dict[str, Any]:
    """The requested resources that affect the speed: neither memory nor minutes."""
    cluster, resources = config.cluster_of("bench"), config.resources_of("bench")
    own = cluster.model_dump(mode="json", include={"backend", "partition", "constraint"})
    gpus = {name: value for name, value in cluster.sbatch.items() if asks_for_gpus(name, value)}
    return {**own, "sbatch": gpus, "cpus": resources.cpus_per_rank, "gpus": resources.gpus_per_rank}


def job_config(config: Config, trainings: Sequence[Resources], folder: Path, overrides: Sequence[str]) -> Config:
    """Make the configuration of a benchmark's job: one task, with room for any two alternating trainings."""
    config = change_config(config, list(overrides))  # before the run's resources become the job's
    rank, ranks = config.resources_of("train"), max(one.ranks for one in trainings)
    gpus = ranks * max(one.gpus_per_rank for one in trainings)
    own: dict[str, Any] = {
        "nodes": 1,
        "ranks_per_node": 1,
        "gpus_per_rank": min(gpus, 1),
        "cpus_per_rank": max(one.ranks * one.cpus_per_rank for one in trainings),
        "memory_gib_per_rank": rank.memory_gib_per_rank * 2 * ranks,
        "minutes": rank.minutes,
        "sbatch": {},
    }
    asked = config.stage_resources.get("bench", StageResources()).sbatch
    if gpus > 1 and not any(names_gpus(name, value) for name, value in asked.items()):
        own["sbatch"] = {"gpus-per-node": gpus}
    data = job_settings(config, "bench", own)
    data |= {"name": folder.name, "runs_dir": str(folder.parent)}
    if data["cluster"]["container"] is not None:  # a job in a container reads the run's folder, too
        data["cluster"]["container"]["mounts"] += [f"{config.runs_dir.absolute()}:{config.runs_dir.absolute()}"]
    return parse_config(data)


def run_here(job: BenchJob, label: str, minutes: int | None = None) -> None:
    """Run a benchmark in a process with a rank's cores, or all devices, and wait; a JobError if it failed."""
    cores, path, log = len(os.sched_getaffinity(0)), job.folder / JOB_FILE, job.folder / f"{label}.log"
    # As in jobs: a benchmark may draw problems that others read.
    environment = {**cache_folders(None), **os.environ, "PYTHONHASHSEED": "0"}
    if job.run_dir is None:
        environment |= process_variables(os.environ.get("OMP_NUM_THREADS", cores), "", has_gpus=True)
    else:
        config = job.subject.config
        resources = config.resources_of("validate")
        has_gpus, cores = bool(resources.gpus_per_rank), min(resources.cpus_per_rank, cores)
        environment |= read_environment_file(config.cluster.environment_file)
        environment |= process_variables(cores, config.model.dtype, has_gpus=has_gpus)
        if not has_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
    job.save(path)
    with log.open("wb") as errors:
        process = [sys.executable, "-m", "specrl.bench.job", str(path), str(os.getpid())]
        try:
            limit = minutes and 60 * minutes
            code = subprocess.run(process, env=environment, stderr=errors, check=False, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            raise JobError(f"bench {job.name} took longer than {minutes} minutes; log: {log}") from None
    if code:
        error = last_error(log.read_text(errors="replace")) or f"it ended with code {code} and without a word"
        raise JobError(f"bench {job.name} failed: {error}; log: {log}")


def measure_cells(cells: Sequence[CellJob], config: Config, at_once: int) -> dict[str, str]:
    """Measure every cell in a job, at most `at_once` in parallel, and record each in MLflow; return errors by label."""
    of_jobs = cells[0].context.config
    backend = backend_of(of_jobs.cluster_of("bench"))
    restrict(of_jobs.cluster)
    if problems := backend.problems(of_jobs):
        raise ConfigError("\n".join(problems))
    reporter = Reporter(Console(stderr=True, highlight=False, soft_wrap=True))
    errors: dict[str, str] = {}
    with only_flow(of_jobs.run_dir, of_jobs.cluster), ThreadPoolExecutor(at_once) as threads:
        forget_stop(of_jobs.run_dir)
        write_config(of_jobs)
        code = snapshot_code(of_jobs.run_dir)
        try:
            futures = {threads.submit(_measure, cell, code, reporter): cell for cell in cells}
            for future in as_completed(futures):
                cell, error = futures[future], future.result()
                _record(config, cell, error)
                errors |= {cell.label: error} if error is not None else {}
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            end_jobs(of_jobs.run_dir, reporter.note)  # running threads then notice the request to stop
            raise
    return errors


def _record(config: Config, cell: CellJob, error: str | None) -> None:
    """Record a cell as a run in an experiment for benchmarks, once unless it failed."""
    job, log, experiment = cell.job, Log(cell.folder), f"{config.tracking.experiment}{BENCHMARKS}"
    last = last_of(log)
    if last is None or last.values.get("status") != "FINISHED":
        tracker = Tracker(log)
        tags = {"specrl.key": cell.context.key, "specrl.run": config.name, "mlflow.source.name": job.command}
        tracker.start(cell.label, {**tags, ERROR_TAG: error or ""})
        tracker.log_params({"benchmark": job.name, "run": config.name, "cell": cell.label, **job.options})
        if error is None:
            for number, row in enumerate(cell.rows()):
                tracker.log_metrics(row_metrics(row), number)
            for path in (job.page, job.json_path):
                tracker.log_artifact(path)
        tracker.end("FINISHED" if error is None else "FAILED")
    import_mlflow()
    if send(config.updated(tracking={"experiment": experiment}), [cell.folder], FLOW_PATIENCE_SECONDS):
        logger.warning("MLflow is away; the rows of %s are sent when the same command is called again", cell.label)


def _measure(cell: CellJob, code: Path, reporter: Reporter) -> str | None:
    """Measure a cell; return why it failed, if it did. Failures are returned so that the other cells continue."""
    cached = cell.is_finished
    if not cached:
        cell.job.save(cell.folder / JOB_FILE)
        try:
            work(cell.context, ENTRY, code, reporter, cell.label)
        except (JobError, StoppedError, SilentSchedulerError) as error:
            reporter.note(f"{cell.label}: {error}")
            return str(error)
    reporter.finished(cell.label, seconds_of(cell.folder) or 0.0, None, before=cached)
    return None


def join_rows(cells: Sequence[CellJob]) -> list[dict[str, Any]]:
    """The rows of all finished cells; a baseline that several cells share appears once."""
    found: dict[Any, dict[str, Any]] = {}
    for row in (row for cell in cells if cell.is_finished for row in cell.rows()):
        found.setdefault((row["cell"], row.get("seed")), row)
    return list(found.values())
