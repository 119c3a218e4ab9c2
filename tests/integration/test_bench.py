"""`specrl bench` from the command line on a toy policy and drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specrl.artifacts import (
    CalibrateResult,
    PrepareResult,
    PretrainResult,
    TrainResult,
    write_result,
    write_text,
)
from specrl.config import Config, dump_config
from specrl.models.families import LLAMA
from specrl.precision.recipe import Recipe, write_recipe
from tests.exactness.toy import policy_weights, toy_config, write_policy, write_trained_drafter
from tests.integration.pipeline_runs import finish, specrl

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
    pretrained = PretrainResult(
        drafter_dir=drafter_dir, rollouts_dir=config.run_dir, num_responses=1, reward_mean=0.0, seconds=1.0
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
    }
    for stage, result in results.items():
        write_result(config.run_dir / "stages" / f"{stage}-0", result)
    return config.run_dir


def bench(run_dir: Path, name: str, *options: str) -> tuple[list[dict[str, Any]], str]:
    """The rows it wrote, and its page."""
    rows, page = run_dir / f"{name}-rows.json", run_dir / f"{name}.md"
    paths = ["--run", str(run_dir), "--json", str(rows), "--page", str(page)]
    output = finish(specrl("bench", name, *paths, *options), seconds=400)
    assert f"page: {page}" in output
    return json.loads(rows.read_text()), page.read_text()


def test_rollouts_are_compared_on_the_same_tokens(run_dir: Path) -> None:
    options = ["--methods", "eagle3,eagle3+replay", "--ks", "3,adaptive", "--batches", "2,tail64", "--repeats", "2"]
    rows, page = bench(run_dir, "rollouts", *options, "--max-tokens", "8", "--no-compile")
    assert all(set(row) == COLUMNS for row in rows)
    cells = {(row["method"], row["k"], row["batch"]): row for row in rows}
    assert set(cells) == {
        *(("none", 0, batch) for batch in (2, "tail64")),
        *(("eagle3", k, batch) for k in (3, "adaptive") for batch in (2, "tail64")),
        *(("eagle3+replay", "adaptive", batch) for batch in (2, "tail64")),
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
    rows, page = bench(run_dir, "drafter", *sizes, "--epochs", "2", "--batches", "2", "--repeats", "1")
    assert [(row["pretrained_on"], row["online"]) for row in rows] == [
        ("off-task", False),
        ("off-task", True),
        ("task", False),
        ("task", True),
    ]
    assert all(len(row["acceptance_length"]) == 2 and set(row["speedup"]) == {"2"} for row in rows)
    # Before the first update a drafter that will be trained online is the frozen one.
    assert rows[0]["acceptance_length"][0] == rows[1]["acceptance_length"][0]
    counted, replayed = page.split("counted ")[1].split()[0], page.split("against ")[-1].split()[0]
    assert float(counted) == pytest.approx(float(replayed), abs=0.02)


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
    rows, page = bench(run_dir, "checkpoints", "--repeats", "2", "--work-seconds", "0.1")
    assert [row["size"] > 3 * 4 * 10**5 for row in rows] == [True, True]  # three numbers of 4 bytes per parameter
    assert all(row["blocking_s"] > 0 < row["load_s"] for row in rows)
    assert "A step of this run takes 1.0 s (median)" in page
    assert not (run_dir / "bench" / "checkpoints").exists()


def test_a_first_look_at_a_gpu_runs_on_a_cpu_too(tmp_path: Path) -> None:
    """Everything runs at tiny size through the same code; what needs a GPU says so, and nothing else is missing."""
    page, rows = tmp_path / "gpu.md", tmp_path / "gpu.json"
    paths = ["--runs-dir", str(tmp_path / "runs"), "--page", str(page), "--json", str(rows)]
    finish(specrl("bench", "gpu", *paths, "--tiny", "--threads", "1"), seconds=900)
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
