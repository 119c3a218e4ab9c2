"""Benchmarks as jobs, each with a key for all that its rows depend on.

The jobs of a run lie in `RUN/bench/cells`, laid out as the stages of a run are. One that has finished there is not
measured again, by whichever command it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import specrl
from slurm.backend import JobError, SilentSchedulerError, StoppedError
from specrl.artifacts import RESULT_FILE, digest
from specrl.bench.job import ENTRY, JOB_FILE, PAGE_FILE, BenchJob
from specrl.config import Config, Resources, change_config, dump_config, parse_config
from specrl.config.sbatch import asks_for_gpus
from specrl.context import StageContext
from specrl.keys import code_digest, file_digest, files_digest, model_fingerprint
from specrl.report.results import find_stages
from tasks.run import Finished, Reporter, work

OWN_CODE = ("bench", "projection", "report")
"""The subpackages that benchmarks depend on and stages do not."""


@dataclass(frozen=True)
class Size:
    """What a job asks for beyond a rank of the run."""

    cores: int
    processes: int
    """The number of processes with a model at once, each of which needs a rank's memory."""
    gpus: int
    """The number of GPUs; 0 on CPUs."""

    @classmethod
    def of_two(cls, trainings: Sequence[Resources]) -> Size:
        """Make room for two trainings that take their steps in turn."""
        ranks = max(one.ranks for one in trainings)
        cores = max(one.ranks * one.cpus_per_rank for one in trainings)
        return cls(cores, 2 * ranks, ranks * max(one.gpus_per_rank for one in trainings))


@dataclass(frozen=True)
class CellJob:
    """A measurement that is a job of its own."""

    label: str
    """What progress lines and MLflow call it."""
    job: BenchJob
    context: StageContext

    @property
    def folder(self) -> Path:
        """The folder of its results."""
        return self.context.stage_dir

    @property
    def is_finished(self) -> bool:
        """Whether it has been measured."""
        return (self.folder / RESULT_FILE).exists()

    def rows(self) -> list[dict[str, Any]]:
        """Read the rows of a finished one."""
        rows: list[dict[str, Any]] = json.loads(self.job.json_path.read_text())
        return rows


def make_cell(label: str, job: BenchJob, folder: Path, config: Config, size: Size, overrides: Sequence[str]) -> CellJob:
    """Make a benchmark a job, with a folder of its own for page, rows and all else.

    Args:
        folder: The folder of the cells.
        config: The configuration whose cluster and resources the job inherits.
        overrides: `KEY=VALUE` each, of the cluster and the resources.
    """
    made = job_config(config, size, folder, overrides)
    key = cell_key(job, place_of(made))
    own = folder / "stages" / key
    context = StageContext(config=made, stage="bench", key=key, stage_dir=own, inputs={}, mlflow_run_id="")
    return CellJob(label, replace(job, page=own / PAGE_FILE, folder=own / "work"), context)


def measure(cell: CellJob, code: Path, reporter: Reporter) -> str | None:
    """Measure a cell, and return why it failed, if it did. A failure is an outcome, so that the other cells go on."""
    cached = cell.is_finished
    if not cached:
        cell.job.save(cell.folder / JOB_FILE)
        try:
            work(cell.context, ENTRY, code, reporter, cell.label)
        except (JobError, StoppedError, SilentSchedulerError) as error:
            reporter.note(f"{cell.label}: {error}")
            return str(error)
    seconds = float(json.loads((cell.folder / RESULT_FILE).read_text())["seconds"])
    reporter.finished(cell.label, Finished("bench", cell.folder, seconds, None, cached))
    return None


def cell_key(job: BenchJob, place: Mapping[str, Any]) -> str:
    """`bench-` and 12 hex digits of the benchmark, its options, what it reads, the code, and where it runs."""
    package = Path(specrl.__file__).parent
    code = (path for part in OWN_CODE for path in (package / part).rglob("*.py"))
    own = files_digest((path, str(path.relative_to(package))) for path in code)
    stages = find_stages(job.run_dir) if job.run_dir is not None else {}
    inputs = {name: stages[name].name for name in ("prepare", "pretrain", "calibrate", "train") if name in stages}
    changes = [change for cell in job.options.get("cells", ()) for change in cell["changes"]]
    read = [_content(change.rpartition("=")[2].strip(' "')) for change in changes]
    return f"bench-{digest([job.name, job.options, read, inputs, code_digest(package), own, place, job.changes])}"


def _content(text: str) -> Any:
    path = Path(text).expanduser()
    if not text or not path.exists():
        return None
    return file_digest(path) if path.is_file() else model_fingerprint(str(path))


def place_of(config: Config) -> dict[str, Any]:
    """Name what is asked of a job's machine and changes how fast it is: not memory, nor minutes."""
    cluster, resources = config.cluster_of("bench"), config.resources_of("bench")
    own = cluster.model_dump(mode="json", include={"backend", "partition", "constraint"})
    gpus = {name: value for name, value in cluster.sbatch.items() if asks_for_gpus(name, value)}
    return {**own, "sbatch": gpus, "cpus": resources.cpus_per_rank, "gpus": resources.gpus_per_rank}


def job_config(config: Config, size: Size, folder: Path, overrides: Sequence[str]) -> Config:
    """Make the configuration of a benchmark's job: one task, with the cores and the memory of all its processes."""
    config = change_config(config, list(overrides))  # before the job's own resources are made of the run's
    rank = config.resources_of("train")
    own: dict[str, Any] = {
        "nodes": 1,
        "ranks_per_node": 1,
        "gpus_per_rank": min(size.gpus, 1),
        "cpus_per_rank": size.cores,
        "memory_gib_per_rank": rank.memory_gib_per_rank * size.processes,
        "minutes": rank.minutes,
    }
    if size.gpus > 1:
        own["sbatch"] = {"gpus-per-node": size.gpus}
    data = json.loads(dump_config(config))
    asked = data["stage_resources"].get("bench", {})
    data["stage_resources"]["bench"] = own | {key: value for key, value in asked.items() if value not in (None, {})}
    data |= {"name": folder.name, "runs_dir": str(folder.parent)}
    if data["cluster"]["container"] is not None:  # a job in a container reads the run's folder, too
        data["cluster"]["container"]["mounts"] += [f"{config.runs_dir.absolute()}:{config.runs_dir.absolute()}"]
    return parse_config(data)
