"""A policy with experts goes from `prepare` to `export` over two ranks; and TP, PP and EP train alike (FP32)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from specrl.schemas import read_folder
from specrl.step_record import StepRecord, read_steps
from tests.forks import run_module
from tests.integration.pipeline_runs import COLUMNS

pytestmark = pytest.mark.engine
MAIN, PARALLEL = "tensor", ["tensor", "pipeline", "experts"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    run_module("tests.integration.parallel_runs", folder)
    return folder


def stage_dir(runs: Path, stage: str, name: str = MAIN) -> Path:
    return runs / name / "stages" / f"{stage}-0"


def result(runs: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stage_dir(runs, stage) / "result.json").read_text())
    return found


def rollouts(runs: Path, name: str) -> list[dict[str, Any]]:
    table = pyarrow.dataset.dataset(stage_dir(runs, "train", name) / "rollouts", format="ipc").to_table(columns=COLUMNS)
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["prompt_id"], row["sample"]))


def trained(runs: Path, name: str, part: str) -> dict[str, Tensor]:
    return load_file(stage_dir(runs, "train", name) / part / "model.safetensors")


def steps(runs: Path, name: str) -> list[StepRecord]:
    return list(read_steps(stage_dir(runs, "train", name) / "steps"))


def test_an_engine_over_two_ranks_answers_every_prompt_of_pretraining_once(runs: Path) -> None:
    rows = list(read_folder(stage_dir(runs, "pretrain") / "rollouts"))
    assert len(rows) == len({row.seed for row in rows}) == result(runs, "pretrain")["num_responses"] == 16
    assert (stage_dir(runs, "pretrain") / "drafter" / "config.json").exists()


def test_experts_are_calibrated_and_their_router_is_not(runs: Path) -> None:
    calibrated = result(runs, "calibrate")
    assert 0 <= calibrated["kl_chosen"] <= max(calibrated["kl_all_fp8"], 0.01)
    table = pyarrow.dataset.dataset(stage_dir(runs, "calibrate") / "layers.arrow", format="ipc").to_table()
    kinds = ("experts", "linear_proj", "linear_qkv")
    assert table.column("name").to_pylist() == [f"layers.{layer}.{kind}" for layer in range(6) for kind in kinds]


def test_speculation_over_two_ranks_changes_no_token_of_the_trained_policy(runs: Path) -> None:
    validated = result(runs, "validate")
    assert [pair["tokens_equal"] for pair in validated["speed"]] == [1.0]
    assert [validated["exactness"][kind]["num_differences"] for kind in ("sampled", "greedy")] == [0, 0]
    assert validated["num_prompts"] == 4


def test_the_export_is_the_trained_policy_and_its_drafter_drafts_in_a_fresh_engine(runs: Path) -> None:
    exported = result(runs, "export")
    expected = result(runs, "validate")["acceptance_length"]
    assert exported["vllm_acceptance_length"] == pytest.approx(expected, rel=0.05) and expected > 1
    model = Qwen3MoeForCausalLM.from_pretrained(stage_dir(runs, "export") / "policy")
    begun = load_file(stage_dir(runs, "prepare") / "policy" / "model.safetensors")
    weights = trained(runs, MAIN, "policy")
    stored = load_file(stage_dir(runs, "export") / "policy" / "model.safetensors")
    assert stored.keys() == weights.keys() == begun.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in weights.items())
    unchanged = [name for name, tensor in weights.items() if torch.equal(tensor, begun[name])]
    assert all(".experts." in name for name in unchanged)  # no token was sent to some of them
    assert model.config.num_experts == 8
    for part in ("drafter", "drafter-speculators"):
        assert (stage_dir(runs, "export") / part / "model.safetensors").exists()


@pytest.mark.parametrize("name", PARALLEL)
def test_the_loop_over_two_ranks_is_the_loop_of_one(runs: Path, name: str) -> None:
    """Up to the order of sums. The drafter learns from samples that depend on the ranks, so its loss does, too."""
    expected, found = rollouts(runs, "alone"), rollouts(runs, name)
    assert len(expected) == 2 * 4 * 4
    for row, other in zip(found, expected, strict=True):
        assert row | {"advantage": 0.0} == other | {"advantage": 0.0}
        assert row["advantage"] == pytest.approx(other["advantage"], abs=1e-6)
    begun = load_file(stage_dir(runs, "prepare") / "policy" / "model.safetensors")
    weights, alone = trained(runs, name, "policy"), trained(runs, "alone", "policy")
    for key, tensor in weights.items():
        assert float((tensor - alone[key]).norm()) <= 0.01 * float((alone[key] - begun[key]).norm()), key
    for record, other_record in zip(steps(runs, name), steps(runs, "alone"), strict=True):
        for metric, rel in {"policy/loss": 1e-4, "policy/grad_norm": 1e-4, "drafter/loss": 0.05}.items():
            assert record.metrics[metric] == pytest.approx(other_record.metrics[metric], rel=rel, abs=1e-6), metric


@pytest.mark.parametrize("name", ["alone", *PARALLEL])
def test_trainer_and_engine_choose_the_same_experts(runs: Path, name: str) -> None:
    """Routes are captured on the first rank of an engine, and reach every rank that has a part of the policy."""
    for record in steps(runs, name):
        assert record.metrics["mismatch/routing_tokens"] == record.metrics["mismatch/routing_layers"] == 0.0
        assert record.metrics["mismatch/token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
