"""`specrl bench` from the command line on a toy policy and drafter."""

from __future__ import annotations

import json
import shlex
import shutil
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mlflow import MlflowClient

from specrl.artifacts import (
    CalibrateResult,
    ExportResult,
    PrepareResult,
    PretrainResult,
    TrainResult,
    write_result,
    write_text,
)
from specrl.config import Config, dump_config
from specrl.context import StageContext
from specrl.models.families import LLAMA
from specrl.precision.recipe import Recipe, write_recipe
from specrl.schemas import Rollout, rollout_path, write_rollouts
from specrl.tracking import start_parent_run, tracking_uri
from tasks.run import read_run_config
from tests.exactness.toy import likely_tokens, policy_weights, toy_config, write_policy, write_trained_drafter
from tests.integration.pipeline_runs import finish, kill, specrl

pytestmark = pytest.mark.engine
COLUMNS = {
    "method",
    "k",
    "batch",
    "tokens_per_s",
    "speedup",
    "speedup_min",
    "speedup_max",
    "speedup_over_default",
    "default_tokens_per_s",
    "acceptance_length",
    "acceptance_rate_per_pos",
    "decode_steps",
}

CONTRACT = {
    "drafter",
    "kind",
    "layers",
    "loss",
    "k",
    "temperature",
    "batch",
    "acceptance_length",
    "acceptance_rate_per_pos",
    "speedup",
}
"""What every row of `specrl bench drafter` has."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has finished training, with nothing in it but what a benchmark reads."""
    runs_dir = tmp_path_factory.mktemp("bench") / "runs"
    values = json.loads(dump_config(toy_config("eagle3", 3))) | {"runs_dir": str(runs_dir)}
    values["drafter"] |= {"draft_vocab_size": 10, "tokens_per_micro_batch": 2048}
    values["resources"] |= {"cpus_per_rank": 1}
    config = Config.model_validate(values)
    write_text(config.run_dir / "config.json", dump_config(config))
    policy_dir = write_policy(config.run_dir / "policy", policy_weights(0))
    drafter_dir = write_trained_drafter(config.run_dir / "drafter", policy_dir)
    tokens = likely_tokens() * 2
    rows = [Rollout(0, 0, 0, i, 0, 0, 0, [5, 6, 7], tokens, [0.0] * len(tokens), "", "", "stop") for i in range(4)]
    write_rollouts(rollout_path(config.run_dir / "rollouts", 0, 0), rows)
    pretrained = PretrainResult(
        drafter_dir=drafter_dir, rollouts_dir=config.run_dir / "rollouts", num_responses=1, reward_mean=0.0, seconds=1.0
    )
    trained = TrainResult(
        policy_dir=policy_dir,
        drafter_dir=drafter_dir,
        policy_step=1,
        steps=1,
        step_seconds_median=1.0,
        timing_share={},
        reward_first=0.0,
        reward_last=0.0,
        mismatch={},
        seconds=1.0,
        acceptance_length=1.0,
        acceptance_rate_per_pos=[],
        refit_checks=1,
        refit_failures=0,
        refit_max_abs_logprob_diff=0.0,
    )
    num_layers = json.loads((policy_dir / "config.json").read_text())["num_hidden_layers"]
    write_recipe(config.run_dir / "scales.json", Recipe(LLAMA, num_layers), policy_dir)
    calibrated = CalibrateResult(
        scales_path=config.run_dir / "scales.json",
        layers_path=config.run_dir,
        bf16_layers=[],
        kl_all_fp8=0.0,
        kl_chosen=0.0,
        seconds=1.0,
    )
    results = {
        "prepare": PrepareResult(policy_dir=policy_dir, seconds=1.0),
        "calibrate": calibrated,
        "pretrain": pretrained,
        "train": trained,
        "export": ExportResult(policy_dir=policy_dir, drafter_dir=drafter_dir, vllm_acceptance_length=1.5, seconds=1.0),
    }
    for stage, result in results.items():
        write_result(config.run_dir / "stages" / f"{stage}-0", result)
    return config.run_dir


def bench(run_dir: Path, name: str, *options: str) -> tuple[Any, str]:
    """What it wrote as JSON, most often rows, and its page."""
    rows, page = run_dir / f"{name}-rows.json", run_dir / f"{name}.md"
    paths = ["--run", str(run_dir), "--json", str(rows), "--page", str(page)]
    output = finish(specrl("bench", name, *paths, *options), seconds=1200)
    assert f"page: {page}" in output
    return json.loads(rows.read_text()), page.read_text()


def test_rollouts_are_compared_on_the_same_tokens(run_dir: Path) -> None:
    options = [
        "--methods",
        "eagle3,eagle3+replay",
        "--ks",
        "3,adaptive,whole",
        "--batches",
        "2,tail64",
        "--repeats",
        "2",
    ]
    rows, page = bench(run_dir, "rollouts", *options, "--max-tokens", "8", "--no-compile")
    assert all(set(row) == COLUMNS for row in rows)
    cells = {(row["method"], row["k"], row["batch"]): row for row in rows}
    assert set(cells) == {
        *(("none", 0, batch) for batch in (2, "tail64")),
        *(("eagle3", k, batch) for k in (3, "adaptive", "whole") for batch in (2, "tail64")),
        *(("eagle3+replay", k, batch) for k in ("adaptive", "whole") for batch in (2, "tail64")),
    }
    for row in rows:
        assert row["speedup_min"] <= row["speedup"] <= row["speedup_max"]
        assert row["tokens_per_s"] > 0
    fixed, plain = cells["eagle3", 3, "tail64"], cells["none", 0, "tail64"]
    assert plain["speedup"] == 1
    # vLLM as it comes, with its own sampler, takes part in every round.
    for batch in (2, "tail64"):
        assert len({row["default_tokens_per_s"] for row in rows if row["batch"] == batch}) == 1
    assert all(row["speedup_over_default"] > 0 and row["default_tokens_per_s"] > 0 for row in rows)
    assert "over default" in page
    assert fixed["acceptance_length"] > 1
    assert len(fixed["acceptance_rate_per_pos"]) == 3
    assert fixed["decode_steps"] < plain["decode_steps"]
    assert "the two sides did the same work" in page  # FP32: every token the same
    assert "| tail64 | eagle3 | 3 |" in page
    assert "verification" in page
    assert (run_dir / "rollouts-speedup.svg").is_file()


def test_drafters_are_compared_over_one_run(run_dir: Path) -> None:
    sizes = ["--num-steps", "2", "--prompts-per-step", "4", "--samples-per-prompt", "2", "--num-prompts", "8"]
    rows, page = bench(run_dir, "drafter", *sizes, "--epochs", "2", "--batches", "2", "--repeats", "1", "--stale")
    stale = [row for row in rows if row["training"] not in ("frozen", "online")]
    rows = [row for row in rows if row not in stale]
    assert [(row["pretrained_on"], row["online"]) for row in rows] == [
        ("off-task", False),
        ("off-task", True),
        ("task", False),
        ("task", True),
    ]
    zeroed, behind = (row["acceptance_length_by_step"] for row in stale)
    frozen = rows[2]["acceptance_length_by_step"]
    assert max(zeroed) < min(frozen)
    assert behind == frozen  # it has the pretrained weights for two steps
    assert '"One step behind" always has' in page
    assert all(len(row["acceptance_length_by_step"]) == 2 and row["batch"] == 2 for row in rows)
    assert all(set(row) >= CONTRACT and 1 <= row["acceptance_length"] <= 4 for row in rows)
    # Before the first update a drafter that will be trained online is the frozen one.
    assert rows[0]["acceptance_length_by_step"][0] == rows[1]["acceptance_length_by_step"][0]
    counted, replayed = page.split("counted ")[1].split()[0], page.split("against ")[-1].split()[0]
    assert float(counted) == pytest.approx(float(replayed), abs=0.02)


def test_losses_are_compared_on_the_same_responses(run_dir: Path) -> None:
    variants = "loss=cross_entropy,loss=reverse_kl+position_decay=measured,parallel=true"
    sizes = ["--seeds", "1", "--num-prompts", "8", "--samples-per-prompt", "2", "--epochs", "20", "--num-held-out", "4"]
    rows, page = bench(run_dir, "losses", "--variants", variants, *sizes, "--batches", "1,2", "--repeats", "1")
    assert [(row["variant"], row["batch"]) for row in rows] == [
        (name, batch) for name in variants.split(",") for batch in (1, 2)
    ]
    contract = "drafter kind layers loss k temperature batch acceptance_length acceptance_rate_per_pos speedup"
    for row in rows:
        assert set(contract.split()) <= set(row)
        assert row["acceptance_length"] > 1 and len(row["acceptance_rate_per_pos"]) == row["k"] == 3
    assert [row["loss"] for row in rows] == ["cross_entropy"] * 2 + ["reverse_kl"] * 2 + ["cross_entropy"] * 2
    assert rows[0]["acceptance_rate_per_pos"] != rows[2]["acceptance_rate_per_pos"]
    assert "`loss=reverse_kl+position_decay=measured`" in page


def test_the_same_fp8_in_both_engines_agrees_where_fp8_in_one_does_not(run_dir: Path) -> None:
    """In FP32 nothing rounds otherwise in the two engines: what is left is how alike they quantise."""
    rows, page = bench(run_dir, "agreement", "--seeds", "1,2", "--num-prompts", "8", "--samples-per-prompt", "2")
    errors = {(row["generation"], row["training"], row["seed"]): row["token_mult_prob_error"] for row in rows}
    assert len(errors) == 8
    for seed in (1, 2):
        assert errors["bf16", "bf16", seed] < errors["fp8", "fp8", seed] < errors["fp8", "bf16", seed]
        assert errors["fp8", "fp8", seed] - 1 < 0.2 * (errors["fp8", "bf16", seed] - 1)
    assert "FP8 both < FP8 generation only: error 2 of 2, bulk 2 of 2, KL 2 of 2" in page


def test_checkpoints_are_measured_and_nothing_is_left_of_them(run_dir: Path) -> None:
    config = read_run_config(run_dir)
    mlflow_run = start_parent_run(config)
    rows, page = bench(run_dir, "checkpoints", "--repeats", "2", "--work-seconds", "0.1")
    assert [row["size"] > 3 * 4 * 10**5 for row in rows] == [True, True]  # three numbers of 4 bytes per parameter
    assert all(row["blocking_s"] > 0 < row["load_s"] for row in rows)
    assert "A step of this run takes 1.0 s (median)" in page
    assert not (run_dir / "bench" / "checkpoints").exists()
    uploaded = MlflowClient(tracking_uri(config)).list_artifacts(mlflow_run, "bench/checkpoints")
    assert {Path(file.path).name for file in uploaded} == {"checkpoints.md", "checkpoints-rows.json"}


def test_a_step_is_compared_with_one_of_trl(run_dir: Path) -> None:
    """Both trainers take real steps on the same policy, prompts and reward, in turn."""
    sizes = ["--prompts-per-step", "4", "--samples-per-prompt", "2", "--max-response-tokens", "8"]
    sizes += ["--peer-sequences", "4", "--steps", "2", "--threads", "1", "--set", "policy.clip_grad=0.5"]
    found, page = bench(run_dir, "step", *sizes)
    assert 0 < found["ratio_min"] <= found["ratio"] <= found["ratio_max"]
    assert set(found["specrl"]) == {"step_s", "generation_s", "update_s", "refit_s", "tokens"}
    assert found["specrl"]["tokens"] == found["peer"]["tokens"] == 64  # no response ends before its limit
    for side in ("specrl", "peer"):
        assert 0 < found[side]["generation_s"] + found[side]["update_s"] <= found[side]["step_s"]
    assert found["peer"]["name"] == "TRL" and found["peer"]["version"]
    assert len(found["steps"]) == 2 and "TRL's step takes" in page and "--set policy.clip_grad=0.5`" in page
    (context,) = run_dir.glob("bench/step-*/context.json")
    assert StageContext.load(context).config.policy.clip_grad == 0.5


def test_whole_trainings_take_their_steps_in_turn_and_sample_the_same_tokens(run_dir: Path) -> None:
    """In FP32, EAGLE-3 with replay and online training leaves every token as it is."""
    values = json.loads(dump_config(read_run_config(run_dir))) | {"name": "whole"}
    values["speculation"]["method"], values["bubbles"]["use"] = "eagle3+replay", "both"
    config = Config.model_validate(values)
    write_text(config.run_dir / "config.json", dump_config(config))
    shutil.copytree(run_dir / "stages", config.run_dir / "stages")
    mlflow_run = start_parent_run(config)
    sizes = ["--prompts-per-step", "4", "--samples-per-prompt", "2", "--max-response-tokens", "16", "--ranks", "1"]
    rows, page = bench(config.run_dir, "run", *sizes, "--uses", "both", "--precisions", "fp32", "--steps", "2")
    assert [(row["use"], row["precision"], row["tokens_equal"]) for row in rows] == [
        ("plain", "fp32", True),
        ("both", "fp32", True),
    ]
    plain, both = rows
    assert plain["ratio_min"] == plain["step_ratio"] == plain["ratio_max"] == 1
    assert 0 < both["ratio_min"] <= both["step_ratio"] <= both["ratio_max"]
    assert both["reward_mean"] == plain["reward_mean"] and both["generation_ratio"] > 0 < both["end_to_end_ratio"]
    assert "- fp32, both: all tokens of all 24 responses are equal." in page
    records = sorted((config.run_dir / "bench" / "run").glob("fp32-0-both/stage/steps/step=*.json"))
    assert len(records) == 3  # the warm-up is a step, too
    metrics = MlflowClient(tracking_uri(config)).get_run(mlflow_run).data.metrics
    assert metrics["speedup/step"] == pytest.approx(both["step_ratio"])
    assert metrics["speedup/end_to_end"] == pytest.approx(both["end_to_end_ratio"])


def test_growth_is_measured_on_the_loop_itself(tmp_path: Path) -> None:
    page, rows = tmp_path / "growth.md", tmp_path / "growth.json"
    paths = ["--runs-dir", str(tmp_path / "runs"), "--page", str(page), "--json", str(rows)]
    sizes = ["--lengths", "48", "--groups", "", "--ranks", "", "--models", "", "--steps", "1", "--warm-up", "0"]
    finish(specrl("bench", "growth", *paths, *sizes), seconds=1200)
    (row,) = json.loads(rows.read_text())
    assert row["seconds"]["step"] > row["least"]["step"] > 0
    assert {"generation", "policy_update", "refit"} < set(row["seconds"])
    assert "| 48 |" in page.read_text()


def test_a_first_look_at_a_gpu_runs_on_a_cpu_too(tmp_path: Path) -> None:
    """Everything runs at tiny size through the same code; what needs a GPU says so, and nothing else is missing."""
    page, rows = tmp_path / "gpu.md", tmp_path / "gpu.json"
    paths = ["--runs-dir", str(tmp_path / "runs"), "--page", str(page), "--json", str(rows)]
    finish(specrl("bench", "gpu", *paths, "--tiny", "--threads", "1"), seconds=1200)
    records = {record["section"]: record for record in json.loads(rows.read_text())}
    on_cpu = {"environment", "fp8", "exactness", "training", "speculation"}
    assert {name: record["status"] for name, record in records.items()} == {
        **dict.fromkeys(on_cpu, "done"),
        "sleep": "done" if torch.cuda.is_available() else "needs a GPU",
    }
    exactness = records["exactness"]["findings"]["figures"]
    assert [value for name, value in exactness.items() if name.endswith("unexplained")] == [0, 0]
    assert exactness["float32 eagle3 graphs off: differences"] == 0
    generation = records["speculation"]["findings"]["figures"]
    assert set(generation["own"]["4"]) == {"default", "plain", "length 2.0", "length 2.5", "length 3.0"}
    assert {"policy", "drafter", "sampler"} < set(generation["iteration at batch 4, k = 3"])
    assert {"bf16", "fp8, emulated"} == set(records["training"]["findings"]["figures"])
    text = page.read_text()
    assert "needs a GPU" in text and "own EAGLE-3, synthetic acceptance length 2.5" in text
    # The same command has nothing left to do, and a section that cannot start is named with the reason.
    output = finish(specrl("bench", "gpu", *paths, "--tiny", "--sections", "exactness,fp8"))
    assert "exactness: done" in output


def test_a_silent_failure_of_a_refit_and_one_of_the_drafter_are_noticed(run_dir: Path) -> None:
    tokens = likely_tokens() * 3
    stored = [Rollout(0, 0, 0, i, 0, 0, 0, [5, 6, 7], tokens, [0.0] * len(tokens), "", "", "stop") for i in range(4)]
    write_rollouts(rollout_path(run_dir, 0, 0), stored)  # what the probes after a refit are made from
    chosen = ["two of the policy's tensors exchanged", "drafter zeroed as after a sleep"]
    rows, page = bench(run_dir, "faults", "--only", ",".join(chosen), "--num-steps", "1", "--threads", "1")
    assert [row["fault"] for row in rows] == chosen
    assert all(row["noticed"] and row["after_steps"] == 0 for row in rows)
    assert "the engine's policy differs from the trainer's in model.layers.0.mlp.down_proj" in rows[0]["message"]
    assert "drafter collapse" in rows[1]["message"]
    assert "2 of 2 faults were noticed" in page


def test_a_run_is_served_with_its_drafter_until_the_command_is_killed(run_dir: Path) -> None:
    """The server drafts for requests at the run's own temperature, and none of its processes outlives the command."""
    process = specrl("serve-model", str(run_dir), "--prompts", "4")
    assert process.stdout is not None
    lines = list(takewhile(lambda line: not line.startswith("it serves until"), process.stdout))
    command = shlex.split(lines[0])
    assert command[:3] == ["vllm", "serve", str(run_dir / "policy")]
    assert json.loads(command[4])["model"] == str(run_dir / "drafter")
    assert "4 held-out prompts at temperature 1" in lines[-1], lines
    assert float(lines[-1].split("acceptance length ")[1].split()[0]) > 1.2
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) > 1, "vLLM has started processes of its own"
    kill(process)
    _, alive = psutil.wait_procs(started, timeout=120)
    assert not [left for left in alive if left.status() != psutil.STATUS_ZOMBIE]


def test_a_drafter_is_measured_on_a_file_of_prompts(run_dir: Path, tmp_path: Path) -> None:
    data, page, rows = tmp_path / "prompts.jsonl", tmp_path / "drafter.md", tmp_path / "rows.json"
    questions = [("chat", "ace"), ("chat", "gik"), ("math", "moq")]
    data.write_text("".join(json.dumps({"turns": [text], "category": name}) + "\n" for name, text in questions))
    paths = ["--model", run_dir / "policy", "--drafter", run_dir / "drafter", "--data", data]
    paths += ["--page", page, "--json", rows, "--runs-dir", tmp_path / "runs"]
    sizes = ["--ks", "2,3", "--temperatures", "1.0", "--batches", "2", "--repeats", "2", "--max-tokens", "24"]
    finish(specrl("bench", "drafter", *map(str, paths), *sizes, "--threads", "1"), seconds=1200)
    found = json.loads(rows.read_text())
    assert [(row["kind"], row["k"]) for row in found] == [
        *(("plain", 0), ("ngram", 2), ("ngram", 3)),
        *(("eagle3", 2), ("eagle3", 3)),
    ]
    assert all(set(row) >= CONTRACT and row["responses_equal"] == 1 for row in found)  # FP32: every token the same
    plain, longest = found[0], found[-1]
    assert (plain["speedup"], plain["acceptance_length"]) == (1, 1)
    assert longest["acceptance_length"] > 1.2 and len(longest["acceptance_rate_per_pos"]) == 3
    assert set(longest["by_category"]) == {"chat", "math"} and "0-15" in longest["by_context_tokens"]
    assert sum(entry["drafts"] for entry in longest["by_context_tokens"].values()) == sum(
        entry["drafts"] for entry in longest["by_response_tokens"].values()
    )
    assert "By category" in page.read_text() and "all variants did the same work" in page.read_text()
