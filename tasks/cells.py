"""The cells of a benchmark: measurements that are jobs of their own, each with a key for all that its rows depend on.

The cells of a run lie in `RUN/bench/cells`, laid out as the stages of a run are. One that has finished there is not
measured again, by whichever sweep it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import specrl
from slurm.bench import JOB_FILE
from specrl.artifacts import RESULT_FILE, digest
from specrl.bench.job import BenchJob
from specrl.bench.settings import BenchSettings
from specrl.config import Config, change_config, dump_config, parse_config
from specrl.config.sbatch import asks_for_gpus
from specrl.context import StageContext
from specrl.keys import code_digest, file_digest, files_digest, model_fingerprint
from specrl.report.results import find_stages

CELLS = "cells"
"""The name of the folder of cells."""
PLACES = ("cluster.", "resources.", "stage_resources.bench.")
"""The beginnings of the keys with which `--set` changes a benchmark's jobs, and not what it measures."""
PAGE_FILE, JSON_FILE = "page.md", "rows.json"
OWN_CODE = ("bench", "projection", "report")
"""The subpackages that benchmarks depend on and stages do not."""
PATHS = ("model", "drafter", "data", "configs")
"""The settings that name files or folders."""
RECORDED_BUBBLES = Path("bench/bubbles/both/stage/steps")
"""What `bench control` reads of another benchmark of the run."""


@dataclass(frozen=True)
class Cell:
    """A measurement that is a job of its own."""

    label: str
    """What progress lines and MLflow call it."""
    parameters: Mapping[str, str | int]
    """Its values in the dimensions of a sweep."""
    settings: BenchSettings
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

    def write_job(self) -> None:
        """Write what its job reads."""
        self.job.save(self.folder / JOB_FILE)


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    cell: Cell
    cached: bool
    """Whether it had been measured before."""
    error: str | None = None
    """Why it failed, in one line; None if it did not."""
    seconds: float = 0.0
    """How long it was measured; 0 if it failed."""
    job_id: str | None = None
    """The job that measured it, if that is known."""


@dataclass(frozen=True)
class Measured:
    """What the cells of one command measure."""

    folder: Path
    """The folder of the cells."""
    config: Config
    """The configuration of the finished run or, for a benchmark without one, of its jobs alone."""
    run_dir: Path | None
    """The folder of the finished run; None for a benchmark without one."""


def make_cell(
    measured: Measured,
    settings: BenchSettings,
    job: BenchJob,
    overrides: Sequence[str],
    label: str,
    parameters: Mapping[str, str | int],
) -> Cell:
    """Return the cell of a benchmark's job, whose page, rows and working folder are set to the cell's own.

    Raises:
        ConfigError: An override is wrong.
    """
    config = job_config(measured.config, settings, measured.folder, overrides)
    key = cell_key(job.name, job.settings, measured.run_dir, place_of(config, job.threads), job.changes)
    folder = measured.folder / "stages" / key
    work_dir = folder / "work"
    return Cell(
        label=label,
        parameters=parameters,
        settings=settings,
        job=replace(
            job,
            run_dir=measured.run_dir or work_dir,
            page=folder / PAGE_FILE,
            json_path=folder / JSON_FILE,
            work_dir=work_dir,
        ),
        context=StageContext(
            config=config,
            stage="bench",
            key=key,
            stage_dir=folder,
            inputs={},
            mlflow_run_id="",
        ),
    )


def cell_key(
    name: str,
    settings: Mapping[str, Any],
    run_dir: Path | None,
    place: Mapping[str, Any] | None = None,
    changes: Sequence[str] = (),
) -> str:
    """Return `bench-` and 12 hex digits of the benchmark, its settings, what it reads, the code, and where it runs.

    Args:
        place: What `place_of` returns.
        changes: The run's settings that are measured with another value.
    """
    package = Path(specrl.__file__).parent
    code = (path for part in OWN_CODE for path in (package / part).rglob("*.py"))
    own = files_digest((path, str(path.relative_to(package))) for path in code)
    stages = find_stages(run_dir) if run_dir is not None else {}
    inputs = {stage: record.key for stage, record in stages.items() if stage in ("prepare", "pretrain", "calibrate")}
    inputs |= {"train": stages["train"].key} if "train" in stages else {}
    named = [settings[key] for key in PATHS if settings.get(key)]
    paths = [Path(path) for value in named for path in (value if isinstance(value, list) else [value])]
    read = [file_digest(path) if path.is_file() else model_fingerprint(str(path)) for path in paths]
    if name == "control" and run_dir is not None:
        read.append(model_fingerprint(str(run_dir / RECORDED_BUBBLES)))
    return f"bench-{digest([name, settings, read, inputs, code_digest(package), own, place, changes])}"


def place_of(config: Config, threads: int | None) -> dict[str, Any]:
    """Return what is asked of a job's machine and changes how fast it is, for `cell_key`: not memory, nor minutes.

    Args:
        config: The configuration of the job.
        threads: The number of CPU threads, if the user chose one.
    """
    cluster, resources = config.cluster_of("bench"), config.resources_of("bench")
    own = cluster.model_dump(mode="json", include={"backend", "partition", "constraint"})
    gpus = {name: value for name, value in cluster.sbatch.items() if asks_for_gpus(name, value)}
    return {**own, "sbatch": gpus, "cpus": resources.cpus_per_rank, "gpus": resources.gpus_per_rank, "threads": threads}


def job_config(config: Config, settings: BenchSettings, folder: Path, overrides: Sequence[str]) -> Config:
    """Return the configuration of a benchmark's job: one task, with the cores and the memory of all its processes.

    Args:
        config: The configuration of the run that is measured, whose cluster and resources it inherits.
        folder: The folder of the cells.
        overrides: `KEY=VALUE` each, of the cluster and the resources.

    Raises:
        ConfigError: An override is wrong.
    """
    config = change_config(config, list(overrides))  # before the job's own resources are made of the run's
    rank = config.resources_of("train")
    own: dict[str, Any] = {
        "nodes": 1,
        "ranks_per_node": 1,
        "gpus_per_rank": rank.gpus_per_rank,
        "cpus_per_rank": settings.cores(config),
        "memory_gib_per_rank": rank.memory_gib_per_rank * settings.processes,
        "minutes": rank.minutes,
    }
    if rank.gpus_per_rank and (ranks := getattr(settings, "ranks", 1)) > 1:
        own["sbatch"] = {"gpus-per-node": ranks}
    data = json.loads(dump_config(config))
    asked = data["stage_resources"].get("bench", {})
    data["stage_resources"]["bench"] = own | {key: value for key, value in asked.items() if value not in (None, {})}
    data |= {"name": folder.name, "runs_dir": str(folder.parent)}
    if data["cluster"]["container"] is not None:  # a job in a container reads the run's folder, too
        data["cluster"]["container"]["mounts"] += [f"{config.runs_dir.absolute()}:{config.runs_dir.absolute()}"]
    return parse_config(data)
