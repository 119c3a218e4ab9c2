"""What a benchmark as a job depends on and asks for, and what becomes of its rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.benchmark import CellJob, cell_key, job_config, join_rows, make_cell, measure_cells, run_here
from slurm.environment import CACHES
from specrl.artifacts import write_json
from specrl.bench.job import BenchJob
from specrl.config import ClusterConfig, Config, ConfigError, Resources
from specrl.tracking.runs import row_metrics

CONFIG = Config(name="r", resources={"memory_gib_per_rank": 2.0, "minutes": 7}, cluster={"partition": "cpu"})
TRAININGS = [Resources(ranks_per_node=3, cpus_per_rank=2), Resources(cpus_per_rank=1)]
JOB = BenchJob("run", {}, "specrl bench run", Path(), Path("a.md"))


def cell(folder: Path, *overrides: str, job: BenchJob = JOB, label: str = "one") -> CellJob:
    return make_cell(label, job, folder / "cells", CONFIG, TRAININGS, overrides)


def test_a_cells_key_changes_with_all_that_its_rows_depend_on(tmp_path: Path) -> None:
    for stage in ("prepare", "train", "validate"):
        (tmp_path / "stages" / f"{stage}-1").mkdir(parents=True)

    def key(run_dir: Path | None = tmp_path, name: str = "run", **options: Any) -> str:
        return cell_key(replace(JOB, name=name, run_dir=run_dir, options=options), {})

    first = key(steps=8)
    assert first.startswith("bench-") and first == key(steps=8)
    (tmp_path / "stages" / "validate-1").rename(tmp_path / "stages" / "validate-2")  # which no benchmark reads
    assert key(steps=8) == first
    drafter, data = tmp_path / "drafter", tmp_path / "prompts.jsonl"
    drafter.mkdir()
    cells: list[dict[str, Any]] = [{"name": "a", "changes": [f'drafter.source="{drafter}"']}]
    others = [key(name="rollouts", steps=8), key(steps=9), key(cells=cells)]
    (drafter / "model.safetensors").write_text("weights")
    others.append(key(cells=cells))
    (tmp_path / "stages" / "train-1").rename(tmp_path / "stages" / "train-2")
    others.append(key(steps=8))
    cells[0]["changes"].append(f'drafter.data="{data}"')
    for text in ("one", "another"):
        data.write_text(text)
        others.append(key(cells=cells))
    (drafter / "config.json").write_text("{}")
    others.append(key(cells=cells))
    assert len({first, *others}) == 9


def test_a_cell_is_measured_again_where_the_machine_is_another_one_and_not_for_more_minutes(tmp_path: Path) -> None:
    def key(*overrides: str) -> str:
        return cell(tmp_path, *[f"stage_resources.bench.{override}" for override in overrides]).context.key

    assert key() == key("minutes=90", "memory_gib_per_rank=3.0", 'account="mine"')
    others = [key('backend="slurm"'), key('partition="fast"'), key("cpus_per_rank=9")]
    assert len({key(), *others}) == 4
    changed = cell(tmp_path, job=replace(JOB, changes=("engine.kv_cache_gib=0.25",)))
    assert changed.context.key != key()


def test_a_job_is_one_task_with_room_for_all_processes_of_the_benchmark(tmp_path: Path) -> None:
    folder = tmp_path / "cells"
    config = job_config(CONFIG, TRAININGS, folder, ['stage_resources.bench.partition="short"'])
    resources = config.resources_of("bench")
    assert (resources.ranks, resources.cpus_per_rank, resources.minutes) == (1, 6, 7)
    assert resources.memory_gib_per_rank == 12.0  # two trainings with three ranks each
    assert config.cluster_of("bench").partition == "short" and config.run_dir == folder
    on_gpus = job_config(CONFIG, [Resources(ranks_per_node=2, gpus_per_rank=1)], folder, [])
    assert on_gpus.cluster_of("bench").sbatch == {"gpus-per-node": 2}
    asking = ["stage_resources.bench.sbatch={exclusive=true}"]
    whole = job_config(CONFIG, [Resources(ranks_per_node=2, gpus_per_rank=1)], folder, asking)
    assert whole.cluster_of("bench").sbatch == {"gpus-per-node": 2, "exclusive": True}
    asking = ['stage_resources.bench.sbatch={gres="gpu:h100:2"}']
    named = job_config(CONFIG, [Resources(ranks_per_node=2, gpus_per_rank=1)], folder, asking)
    assert named.cluster_of("bench").sbatch == {"gres": "gpu:h100:2"}
    longer = job_config(CONFIG, TRAININGS, folder, ["resources.minutes=99", "resources.memory_gib_per_rank=3.0"])
    assert (longer.resources_of("bench").minutes, longer.resources_of("bench").memory_gib_per_rank) == (99, 18.0)


def test_a_cell_has_a_folder_of_its_own_for_all_that_it_writes(tmp_path: Path) -> None:
    made = cell(tmp_path, job=replace(JOB, run_dir=tmp_path))
    assert made.folder.parent == tmp_path / "cells" / "stages" and made.context.stage == "bench"
    assert {path.parent for path in (made.job.page, made.job.json_path, made.job.folder)} == {made.folder}
    assert made.job.run_dir == tmp_path and not made.is_finished
    made.folder.mkdir(parents=True)
    made.job.save(made.folder / "job.json")
    assert BenchJob.load(made.folder / "job.json") == made.job


def test_rows_of_all_finished_cells_are_joined_and_that_of_a_baseline_comes_once(tmp_path: Path) -> None:
    cells = [cell(tmp_path, job=replace(JOB, options={"number": number})) for number in range(3)]
    for number, made in enumerate(cells[:2]):
        write_json(made.job.json_path, [{"cell": "plain", "n": number}, {"cell": f"k{number}", "n": number}])
        write_json(made.folder / "result.json", {})
    rows = join_rows(cells)
    assert [(row["cell"], row["n"]) for row in rows] == [("plain", 0), ("k0", 0), ("k1", 1)]
    assert row_metrics({"k": "3", "a: b": 2, "same": True}) == {"bench/a_ b": 2.0, "bench/same": 1.0}


def variables_of(job: BenchJob, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a benchmark's process on this machine."""
    program = job.folder / "python"
    program.write_text(f"#!/bin/sh\nenv > {job.folder}/variables\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    run_here(job, "job")
    return dict(line.split("=", 1) for line in (job.folder / "variables").read_text().splitlines() if "=" in line)


def test_a_benchmark_on_this_machine_has_folders_for_compiled_kernels_as_a_job_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in FP8 asks for that of DeepGEMM. The user's choice stands."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    monkeypatch.delenv("DG_JIT_CACHE_DIR", raising=False)
    found = variables_of(replace(JOB, folder=tmp_path), monkeypatch)
    assert found.keys() >= CACHES.keys() and found["TRITON_CACHE_DIR"] == "/mine"
    assert Path(found["DG_JIT_CACHE_DIR"]).name == "deep_gemm"


def test_jobs_of_a_benchmark_trust_whom_the_run_trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(_: Path, cluster: ClusterConfig) -> None:
        raise ConfigError(f"held with {cluster.trusted_groups}")

    monkeypatch.setattr("flows.benchmark.only_flow", hold)
    trusting = CONFIG.updated(cluster={"trusted_groups": ("team",)})
    made = make_cell("one", JOB, tmp_path / "cells", trusting, TRAININGS, ())
    with pytest.raises(ConfigError, match=r"held with \('team',\)"):
        measure_cells([made], trusting, 1)


def test_a_benchmark_on_this_machine_has_the_secrets_and_the_precision_of_the_runs_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = tmp_path / "secrets"
    secrets.touch(mode=0o600)
    secrets.write_text("JUDGE_KEY=sesame\n")
    more = {"resources": {"gpus_per_rank": 1}, "cluster": {"environment_file": secrets}}
    config = CONFIG.updated(model={"dtype": "float32"}, **more)
    monkeypatch.setattr(BenchJob, "subject", SimpleNamespace(config=config))
    found = variables_of(replace(JOB, folder=tmp_path, run_dir=tmp_path), monkeypatch)
    assert found["JUDGE_KEY"] == "sesame" and found["NVIDIA_TF32_OVERRIDE"] == "0"
