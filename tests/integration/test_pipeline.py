"""The whole pipeline on a tiny model: the contract of its results, and that no kill changes them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pyarrow.dataset
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flows.cli import EXIT_STOPPED
from slurm.backend import JobKey
from specrl.config import STAGES
from specrl.lineage.record import own_copy
from specrl.report.results import read_config
from tasks.run import ask_to_stop
from tests.integration.disturbances import Disturbed, held, ranks_of
from tests.integration.pipeline_runs import (
    assert_same_result,
    finish,
    kill,
    rollouts,
    run_smoke,
    specrl,
    wait_for,
)
from tests.slurm.devcluster import DevCluster

pytestmark = pytest.mark.pipeline


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; its folder."""
    runs_dir = tmp_path_factory.mktemp("pipeline") / "runs"
    output = finish(run_smoke(runs_dir))
    assert "vllm serve" in output
    return runs_dir / "smoke"


def test_summary_holds_the_contract(undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert set(summary) == {
        *("run", "mlflow_run_id", "stages", "validation", "speculation"),
        *("train", "mismatch", "precision", "refit", "export", "events", "segments", "best", "data"),
    }
    curve = summary["validation"]["curve"]
    assert [(score["step"], score["set"]) for score in curve] == [(step, "held-out") for step in (0, 2, 3)]
    # The engines differ, and so does the number of ranks; policy, prompts and seeds do not.
    before, after = summary["validation"]["accuracy_before"], summary["validation"]["accuracy_after"]
    assert (curve[0]["accuracy"], curve[-1]["accuracy"]) == (before, after)
    assert (Path(summary["best"]["policy_dir"]) / "model.safetensors").exists()
    assert summary["best"]["value"] == max(score["accuracy"] for score in curve)
    exactness = summary["validation"]["exactness"]
    assert 0 < exactness["num_accepted_tokens"] < exactness["num_draft_tokens"]
    assert exactness["sampled"]["num_unexplained"] == exactness["greedy"]["num_unexplained"] == 0
    assert set(summary["stages"]) == set(STAGES)
    assert summary["validation"]["num_prompts"] == 16
    assert summary["train"]["steps"] == 3
    assert summary["refit"] == {**summary["refit"], "checks": 4, "failures": 0}
    assert set(summary["speculation"]["generation_speedup"]) == {"1", "4"}
    assert summary["export"]["vllm_acceptance_length"] == pytest.approx(
        summary["speculation"]["acceptance_length"], rel=0.05
    )


def test_rollouts_are_one_arrow_data_set_of_scored_groups(undisturbed: Path) -> None:
    rows = rollouts(undisturbed)
    assert len(rows) == 3 * 8 * 4
    assert len({row["seed"] for row in rows}) == len(rows)
    for start in range(0, len(rows), 4):
        group = rows[start : start + 4]
        assert len({row["prompt_id"] for row in group}) == 1
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-4)


def test_plain_and_speculative_generation_give_the_same_tokens(undisturbed: Path) -> None:
    result = json.loads(next(undisturbed.glob("stages/validate-*/result.json")).read_text())
    assert [pair["tokens_equal"] for pair in result["speed"]] == [1.0, 1.0]


def test_the_policy_answers_other_prompts_for_the_drafter_alone(undisturbed: Path) -> None:
    own, others = (
        pyarrow.dataset.dataset(next(undisturbed.glob(f"stages/pretrain-*/{folder}")), format="ipc")
        .to_table()
        .to_pylist()
        for folder in ("rollouts", "drafter-data")
    )
    assert (len(own), len(others)) == (32 * 2, 4 * 2)
    assert {row["reward"] for row in others} == {0.0} and len({row["seed"] for row in own + others}) == 72
    result = json.loads(next(undisturbed.glob("stages/pretrain-*/result.json")).read_text())
    assert result["num_responses"] == 64
    assert result["reward_mean"] == pytest.approx(sum(row["reward"] for row in own) / 64)


def test_export_holds_a_drafter_in_both_formats(undisturbed: Path, tmp_path: Path) -> None:
    card = (undisturbed / "export" / "drafter" / "README.md").read_text()
    assert card.startswith("# EAGLE-3 drafter of run smoke")
    length = json.loads((undisturbed / "summary.json").read_text())["export"]["vllm_acceptance_length"]
    assert f"| held-out | 1 | all | {length:.2f} (by position" in card and "| held-out | 0 | 16 to 31 |" in card
    with safe_open(undisturbed / "export" / "drafter-speculators" / "model.safetensors", framework="pt") as file:
        assert "layers.0.self_attn.q_proj.weight" in file.keys()  # noqa: SIM118  (not a dict)
    output = finish(specrl("export", str(undisturbed), "--format", "sglang", "--to", str(tmp_path / "sglang")))
    assert "python -m sglang.launch_server" in output
    copied = (tmp_path / "sglang" / "README.md").read_text()
    assert copied.partition("    python -m")[0] == card.partition("    vllm serve")[0]


def test_mlflow_has_a_child_run_per_stage(undisturbed: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{undisturbed.parent / 'mlflow.db'}")
    parent = client.get_run((undisturbed / "mlflow_run_id").read_text().strip())
    children = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert parent.info.status == "FINISHED"
    assert sorted(child.info.run_name for child in children) == sorted(STAGES)
    assert {child.info.status for child in children} == {"FINISHED"}
    train = next(child for child in children if child.info.run_name == "train")
    assert len(client.get_metric_history(train.info.run_id, "reward/mean")) == 3


def test_a_finished_run_runs_nothing_again(undisturbed: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.glob("stages/*/result.json")}
    finish(specrl("resume", str(undisturbed)))
    assert {path: path.stat().st_mtime_ns for path in undisturbed.glob("stages/*/result.json")} == before


def test_a_stop_and_a_killed_rank_cost_no_more_than_their_step(undisturbed: Path, tmp_path: Path) -> None:
    run_dir = copy_without_train(undisturbed, tmp_path)
    train = Disturbed(run_dir, "train")
    process = specrl("resume", str(run_dir))
    with train.in_first_step(1):
        ask_to_stop(run_dir)
        time.sleep(3)  # the first rank looks every second
    output, _ = process.communicate(timeout=1200)
    assert process.returncode == EXIT_STOPPED, output
    assert "run smoke was stopped in train after step" in output
    process = specrl("resume", str(run_dir))
    with train.in_first_step(2):
        os.kill(ranks_of(run_dir)[-1], signal.SIGKILL)
    finish(process)
    assert train.reasons() == ["stopped", "killed", "finished"]
    assert_same_result(undisturbed, run_dir)


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_extended_and_changed_and_loses_nothing(undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / undisturbed.name
    shutil.copytree(undisturbed, run_dir, symlinks=True)
    own_copy(run_dir)
    shutil.copy(undisturbed.parent / "mlflow.db", tmp_path)
    change = ["--steps", "4", "--set", "policy.lr=2e-5", "--set", "validate.speed_batches=[1]"]
    (old,) = run_dir.glob("stages/train-*")
    before = files(run_dir / "stages")
    said = finish(specrl("resume", str(run_dir), *change, "--dry-run"))
    assert files(run_dir / "stages") == before
    assert f"from step 3 of {old.name}" in said
    assert "policy.lr = 0.0002 -> 2e-05" in said
    finish(specrl("resume", str(run_dir), *change))
    assert files(run_dir / "stages").items() >= before.items()
    assert {path.name.partition("-")[0] for path in run_dir.glob("stages/*")} == set(STAGES)
    assert len(list(run_dir.glob("stages/p*"))) == 2
    assert [row for row in rollouts(run_dir) if row["step"] < 3] == rollouts(undisturbed)
    assert len(rollouts(run_dir)) == 4 * 8 * 4
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["train"]["steps"] == 4
    assert {"train.num_steps = 3 -> 4", "policy.lr = 0.0002 -> 2e-05"} == {
        event["text"] for event in summary["events"] if event["kind"] == "settings"
    }
    assert "policy.lr = 0.0002 -&gt; 2e-05" in (run_dir / "report.html").read_text()


def test_a_run_starts_from_another_runs_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "smoke", symlinks=True)
    smaller = ("name=fork", "seed=8", "train.num_steps=1", "drafter.num_prompts=4", "validate.num_prompts=4")
    overrides = [word for override in (*smaller, "validate.speed_batches=[1]") for word in ("--set", override)]
    process = run_smoke(tmp_path, "--from", "smoke@3", *overrides)
    other = tmp_path / "smoke"
    wait_for(tmp_path / "fork", "run.json")
    to = ("--to", str(tmp_path / "policy"), "--runs-dir", str(tmp_path))
    finish(specrl("export", "smoke@3", "--format", "policy", *to))
    shutil.rmtree(other)  # the new run needs it no more
    finish(process)
    run_dir = tmp_path / "fork"
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["origin"]["run"], record["origin"]["step"]) == ("smoke", 3)
    (first,) = run_dir.glob("stages/prepare-*/policy/model.safetensors")
    expected = load_file(undisturbed / "export" / "policy" / "model.safetensors")
    for path in (first, tmp_path / "policy" / "model.safetensors"):
        found = load_file(path)
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    (drafter,) = run_dir.glob("stages/pretrain-*/drafter/model.safetensors")
    trained = load_file(undisturbed / "export" / "drafter" / "model.safetensors")
    assert [name for name, tensor in load_file(drafter).items() if not torch.equal(trained[name], tensor)] == []
    assert {row["step"] for row in rollouts(run_dir)} == {0}
    assert {row["seed"] for row in rollouts(run_dir)}.isdisjoint(row["seed"] for row in rollouts(undisturbed))


@pytest.mark.slurm
def test_slurm_runs_one_job_per_stage_whatever_ends_it_and_though_the_flow_is_killed_twice(
    undisturbed: Path, devcluster: DevCluster, tmp_path: Path
) -> None:
    """In the order of what happens to the job of `train`: it gets too little time, is queued again by hand, loses a
    node, is preempted without grace, and has a rank that hangs. Meanwhile the flow is killed."""
    two_nodes = "stage_resources.train={nodes=2, ranks_per_node=1, cpus_per_rank=1}"
    run_dir = tmp_path / "smoke"
    cluster = ["cluster.partition=spot", "cluster.hang_minutes=0.25", f"cluster.setup=['{held(run_dir, 'train')}']"]
    settings = [word for setting in (two_nodes, *cluster) for word in ("--set", setting)]
    process = run_smoke(tmp_path, "--cluster", "slurm", *settings)
    wait_for(run_dir, "stages/pretrain-*/progress.json")
    kill(process)
    process = specrl("resume", str(run_dir))
    train = Disturbed(run_dir, "train")
    train.cut_short(seconds=20)
    train.queue_again(2)
    train.lose_a_node(3)
    kill(process)
    process = specrl("resume", str(run_dir))
    train.preempt(4)
    train.freeze_a_rank(5)
    finish(process)
    reasons = ["walltime", "requeued", "node lost", "preempted", "hang", "finished"]
    assert train.reasons() == reasons
    assert json.loads((run_dir / "summary.json").read_text())["segments"]["train"] == {"number": 6, "reasons": reasons}
    assert jobs_per_stage(run_dir) == dict.fromkeys(STAGES, 1)
    assert rewards_in_mlflow(run_dir) == [0, 1, 2]
    assert_same_result(undisturbed, run_dir)


def rewards_in_mlflow(run_dir: Path) -> list[int]:
    """The step of each reward that the one MLflow run of `train` has."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    parent = client.get_run((run_dir / "mlflow_run_id").read_text().strip())
    children = client.search_runs([parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    (train,) = (child for child in children if child.info.run_name == "train")
    return sorted(metric.step for metric in client.get_metric_history(train.info.run_id, "reward/mean"))


def copy_without_train(source: Path, target: Path) -> Path:
    """The run as it was before `train`, in a runs folder of its own with the same MLflow database."""
    run_dir = target / source.name
    shutil.copytree(source, run_dir, symlinks=True)
    shutil.copy(source.parent / "mlflow.db", target)
    for pattern in ("stages/train-*", "stages/validate-*", "stages/export-*", "rollouts", "export"):
        for path in run_dir.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in run_dir.glob("jobs/*.json"):
        path.unlink()
    return run_dir


def jobs_per_stage(run_dir: Path) -> dict[str, int]:
    """The number of jobs that Slurm's accounting has for each stage of this run."""
    own = JobKey(read_config(run_dir), "").job_name
    text = subprocess.run(["sacct", "-nPX", "-o", "JobName"], capture_output=True, text=True, check=True).stdout
    names = [line.partition("-")[0] for line in text.splitlines() if line.endswith(own)]
    return {stage: names.count(stage) for stage in STAGES}
