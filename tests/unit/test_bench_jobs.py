"""What a benchmark as a job depends on and asks for, and what becomes of its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flows.cli import invoke
from flows.commands.bench.jobs import clear, copy_results
from specrl.bench.job import BenchJob
from specrl.bench.run.settings import RunSettings
from specrl.bench.settings import GrowthSettings
from specrl.bench.subject import changed_config
from specrl.bench.sweep.page import SweptCell, series_along, write_sweep_page
from specrl.bench.sweep.rows import convert, read_arrow
from specrl.config import Config, ConfigError, dump_config
from specrl.tracking.benchmarks import row_metrics
from tasks.cells import Measured, cell_key, job_config, make_cell

CONFIG = Config(name="r", resources={"memory_gib_per_rank": 2.0, "minutes": 7}, cluster={"partition": "cpu"})


def test_a_cells_key_changes_with_all_that_its_rows_depend_on(tmp_path: Path) -> None:
    for stage in ("prepare", "train", "validate"):
        (tmp_path / "stages" / f"{stage}-1").mkdir(parents=True)
    settings = RunSettings().model_dump(mode="json")
    key = cell_key("run", settings, tmp_path)
    assert key.startswith("bench-") and key == cell_key("run", settings, tmp_path)
    (tmp_path / "stages" / "validate-1").rename(tmp_path / "stages" / "validate-2")  # which no benchmark reads
    assert cell_key("run", settings, tmp_path) == key
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    with_drafter = settings | {"drafter": str(drafter)}
    others = [cell_key("rollouts", settings, tmp_path), cell_key("run", settings | {"steps": 9}, tmp_path)]
    others.append(cell_key("run", with_drafter, tmp_path))
    (drafter / "model.safetensors").write_text("weights")
    others.append(cell_key("run", with_drafter, tmp_path))
    (tmp_path / "stages" / "train-1").rename(tmp_path / "stages" / "train-2")
    others.append(cell_key("run", settings, tmp_path))
    data = tmp_path / "prompts.jsonl"
    for text in ("one", "another"):
        data.write_text(text)
        others.append(cell_key("drafter", {"drafter": [str(drafter)], "data": str(data)}, None))
    (drafter / "config.json").write_text("{}")
    others.append(cell_key("drafter", {"drafter": [str(drafter)], "data": str(data)}, None))
    for text in ("steps = 1", "steps = 2"):
        data.write_text(text)
        others.append(cell_key("projection", {"configs": [str(data)]}, None))
    others.append(cell_key("control", {}, tmp_path))
    (tmp_path / "bench" / "bubbles" / "both" / "stage" / "steps").mkdir(parents=True)
    others.append(cell_key("control", {}, tmp_path))
    assert len({key, *others}) == 13


def test_a_cell_is_measured_again_where_the_machine_is_another_one_and_not_for_more_minutes(tmp_path: Path) -> None:
    def key(*overrides: str, threads: int | None = None) -> str:
        job = BenchJob("specrl.bench.run.main:main", Path(), {}, "specrl", Path(), Path(), threads=threads)
        own = [f"stage_resources.bench.{override}" for override in overrides]
        return make_cell(Measured(tmp_path, CONFIG, None), RunSettings(), job, own, "one", {}).context.key

    assert key() == key("minutes=90", "memory_gib_per_rank=3.0", 'account="mine"')
    others = [key('backend="slurm"'), key('partition="fast"'), key("cpus_per_rank=9"), key(threads=2)]
    assert len({key(), *others}) == 5


def test_a_job_is_one_task_with_room_for_all_processes_of_the_benchmark(tmp_path: Path) -> None:
    settings = RunSettings(uses=("eagle3", "both"), ranks=2, threads=3)
    config = job_config(CONFIG, settings, tmp_path / "cells", ['stage_resources.bench.partition="short"'])
    resources = config.resources_of("bench")
    assert (resources.ranks, resources.cpus_per_rank, resources.minutes) == (1, 6, 7)
    assert resources.memory_gib_per_rank == 12.0  # three uses with two ranks each
    assert config.cluster_of("bench").partition == "short" and config.run_dir == tmp_path / "cells"
    on_gpus = CONFIG.model_copy(update={"resources": CONFIG.resources.model_copy(update={"gpus_per_rank": 1})})
    assert job_config(on_gpus, settings, tmp_path / "cells", []).cluster_of("bench").sbatch == {"gpus-per-node": 2}
    assert job_config(CONFIG, GrowthSettings(ranks=(1, 4)), tmp_path, []).resources_of("bench").cpus_per_rank == 4
    longer = job_config(CONFIG, settings, tmp_path, ["resources.minutes=99", "resources.memory_gib_per_rank=3.0"])
    assert (longer.resources_of("bench").minutes, longer.resources_of("bench").memory_gib_per_rank) == (99, 18.0)


def test_a_cell_has_a_folder_of_its_own_for_all_that_it_writes(tmp_path: Path) -> None:
    job = BenchJob("specrl.bench.run.main:main", Path(), {}, "specrl bench run", tmp_path / "a.md", tmp_path / "a.json")
    cell = make_cell(Measured(tmp_path / "cells", CONFIG, tmp_path), RunSettings(), job, [], "one", {})
    assert cell.folder.parent == tmp_path / "cells" / "stages" and cell.context.stage == "bench"
    assert {path.parent for path in (cell.job.page, cell.job.json_path, cell.job.folder)} == {cell.folder}
    assert cell.job.run_dir == tmp_path and not cell.is_finished
    cell.folder.mkdir(parents=True)
    cell.write_job()
    assert BenchJob.load(cell.folder / "job.json") == cell.job


def test_rows_survive_arrow_whatever_their_columns_hold(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"k": 3, "speedup": 1.5}, {"k": "adaptive", "by": {"2": 1.0}, "same": true}]')
    convert(tmp_path / "rows.json", tmp_path / "rows.arrow")
    rows = read_arrow(tmp_path / "rows.arrow")
    assert [row["k"] for row in rows] == ["3", "adaptive"] and rows[0]["speedup"] == 1.5 and rows[1]["same"]
    assert row_metrics({"k": "3", "a: b": 2, "same": True}) == {"bench/a_ b": 2.0, "bench/same": 1.0}
    (tmp_path / "rows.json").write_text('{"ratio": 2.0}')
    convert(tmp_path / "rows.json", tmp_path / "rows.arrow")
    assert read_arrow(tmp_path / "rows.arrow") == [{"ratio": 2.0}]


def test_the_page_of_a_sweep_has_its_rows_a_chart_by_k_and_what_failed(tmp_path: Path) -> None:
    numbers = ("generation_ratio", "step_ratio", "end_to_end_ratio", "ratio_min", "ratio_max", "same_responses")
    more = ("reward_difference", "reward_p_value", "reserved_hours_per_million_tokens")
    rows = [
        {"method": method, "k": k, "hardware": "two cores", **dict.fromkeys((*numbers, *more), 1.0 + k / 10)}
        for method in ("eagle3", "ngram")
        for k in (3, 1)
    ]
    cells = [SweptCell("eagle3 1", "bench-1", "7", 90.0, True), SweptCell("eagle3 3", "bench-2", "8", 60.0, False)]
    write_sweep_page(tmp_path / "page.md", "specrl bench sweep", ["method", "k"], rows, cells, {"ngram 5": "it broke"})
    page = (tmp_path / "page.md").read_text()
    assert "| eagle3 | 3 | 1.30x | 1.30x (1.30 to 1.30) |" in page and "- ngram 5: it broke" in page
    assert "| eagle3 1 | 7 | 1.5 | earlier | `bench-1` |" in page and "| this | `bench-2` |" in page
    assert page.count("Hardware: two cores.") == 1
    assert (tmp_path / "page-k.svg").is_file() and not (tmp_path / "page-method.svg").exists()
    assert series_along("k", ["method", "k"], rows)["ngram"] == [(1.0, 1.1), (3.0, 1.3)]


def test_results_are_copied_under_the_name_of_the_page(tmp_path: Path) -> None:
    cell = tmp_path / "cell"
    cell.mkdir()
    (cell / "page.md").write_text("![speed](page-speed.svg)\n")
    (cell / "page-speed.svg").write_text("<svg/>")
    (cell / "rows.json").write_text("[]")
    copy_results(cell, tmp_path / "mine.md", tmp_path / "mine.json")
    assert (tmp_path / "mine.md").read_text() == "![speed](mine-speed.svg)\n"
    assert (tmp_path / "mine-speed.svg").read_text() == "<svg/>" and (tmp_path / "mine.json").read_text() == "[]"


def test_a_benchmark_without_a_run_begins_anew_and_keeps_what_its_jobs_have_measured(tmp_path: Path) -> None:
    kept = tmp_path / "bench" / "cells" / "stages" / "bench-1" / "rows.json"
    left = [tmp_path / "size-0" / "plan.json", tmp_path / "plan-rows.json", tmp_path / "bench" / "plan.json"]
    for path in (kept, *left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[]")
    clear(tmp_path)
    assert kept.is_file() and not any(path.exists() for path in left)
    assert {path.name for path in tmp_path.iterdir()} == {"bench"}


def test_options_of_jobs_need_a_cluster_and_settings_of_a_run_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--at-once", "3"], "--at-once is for jobs: give --cluster, too"),
        (["--set", "cluster.partition=fast"], "--set cluster.partition=fast is for jobs: give --cluster, too"),
        (["--set", "engine.kv_cache_gib=1"], "--set engine.kv_cache_gib=1: bench plan measures no run here"),
    ):
        assert invoke(["bench", "plan", *options]) == 2
        assert said in capsys.readouterr().err


def test_a_benchmark_measures_a_run_with_other_settings_that_it_does_not_set_itself(tmp_path: Path) -> None:
    changes = ("engine.kv_cache_gib=0.25", "train.prompts_per_step=6")
    (tmp_path / "config.json").write_text(dump_config(CONFIG))
    plain = BenchJob("specrl.bench.run.main:main", tmp_path, {}, "specrl bench run", tmp_path, tmp_path)
    job = replace(plain, changes=changes)
    assert (job.config.engine.kv_cache_gib, job.config.train.prompts_per_step) == (0.25, 6)
    assert plain.config == CONFIG and plain.folder != job.folder
    trainings = RunSettings(prompts_per_step=4).trainings(job.config)
    assert {training.engine.kv_cache_gib for training in trainings} == {0.25}
    assert {training.train.prompts_per_step for training in RunSettings().trainings(job.config)} == {6}
    job.check_taken(RunSettings().trainings(job.config))
    with pytest.raises(ConfigError, match=r"--set train\.prompts_per_step: this benchmark sets it itself"):
        job.check_taken(trainings)
    keys = [make_cell(Measured(tmp_path, CONFIG, tmp_path), RunSettings(), one, [], "", {}) for one in (plain, job)]
    assert keys[0].context.key != keys[1].context.key


@pytest.mark.parametrize("change", ["model.source=tiny2", "drafter.num_layers=2", "speculation.method=mtp", "seed=3"])
def test_what_a_run_has_made_cannot_be_measured_with_other_settings_of_it(change: str) -> None:
    with pytest.raises(ConfigError, match=f"--set {change.partition('=')[0]}: a benchmark measures what the run has"):
        changed_config(CONFIG, [change])
