"""Dynamic sampling asks the same prompts whatever drafts, ranks and kills there are; its rollouts are exact (FP32)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
import torch
from safetensors.torch import load_file

from specrl.config import parse_config
from specrl.data.prompts import PromptSource
from specrl.models.sources import load_tokenizer
from tests.forks import run_module
from tests.integration.loop_plan import LoopRun, toy_settings

pytestmark = pytest.mark.engine
COLUMNS = ["step", "prompt_id", "sample", "seed", "response_tokens", "reward", "advantage", "finish_reason"]
NUM_STEPS, GROUPS = 3, 8
DAPO = {"algorithm": "dapo", "num_steps": NUM_STEPS}
PLAIN = {"speculation": {"method": "none", "k": 0}}
BOTH = {"speculation": {"method": "eagle3+replay"}, "bubbles": {"use": "both"}}
RUNS = [
    LoopRun("plain", settings={**PLAIN, "train": DAPO}),
    LoopRun("alone", ranks=1, settings={**PLAIN, "train": DAPO}),
    LoopRun("bubbles", uneven=True, settings={**BOTH, "train": DAPO}),
    LoopRun("killed", kills=2, settings={**BOTH, "train": DAPO}),
    LoopRun("killed-refilling", dies_refilling=True, settings={**BOTH, "train": DAPO}),
    LoopRun("tensor-parallel", ranks=4, settings={**BOTH, "train": DAPO, "engine": {"tensor_parallel": 2}}),
    LoopRun("bounded", settings={**PLAIN, "train": {**DAPO, "algorithm": None, "refill_rounds": 1}}),
    LoopRun("undisturbed", settings={**PLAIN, "train": {"num_steps": 1}}),
    LoopRun("kept", settings={**PLAIN, "train": {"num_steps": 1, "drop_zero_signal_groups": False}}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refills")
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in RUNS]))
    run_module("tests.integration.loop_runs", folder, folder / "runs.json")
    return folder


def rows(runs: Path, name: str, columns: list[str] = COLUMNS) -> list[dict[str, Any]]:
    table = pyarrow.dataset.dataset(runs / name / "train-toy" / "rollouts", format="ipc").to_table(columns=columns)
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["prompt_id"], row["sample"]))


def rewards_of(runs: Path, name: str, step: int) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in rows(runs, name):
        if row["step"] == step:
            found.setdefault(row["prompt_id"], []).append(row["reward"])
    return found


def metrics(runs: Path, name: str) -> list[dict[str, float]]:
    paths = sorted((runs / name / "train-toy" / "steps").glob("*.json"))
    return [json.loads(path.read_text())["metrics"] for path in paths]


@pytest.mark.parametrize("name", ["bubbles", "killed", "killed-refilling"])
def test_rollouts_and_policy_are_those_of_a_run_without_drafts_bubbles_and_kills(runs: Path, name: str) -> None:
    assert rows(runs, name) == rows(runs, "plain")
    expected = load_file(runs / "plain" / "train-toy" / "policy" / "model.safetensors")
    found = load_file(runs / name / "train-toy" / "policy" / "model.safetensors")
    assert [key for key, tensor in found.items() if not torch.equal(tensor, expected[key])] == []


@pytest.mark.parametrize("name", ["alone", "tensor-parallel"])
def test_other_ranks_ask_and_sample_the_same(runs: Path, name: str) -> None:
    """Up to the order in which the sums of a policy's update are made, and so exactly in the first step."""
    expected = [row for row in rows(runs, "plain") if row["step"] == 0]
    assert [row for row in rows(runs, name) if row["step"] == 0] == expected


def test_ranks_were_killed_and_one_of_them_within_a_refill(runs: Path) -> None:
    outcomes = {name: json.loads((runs / name / "outcome.json").read_text()) for name in ("killed", "killed-refilling")}
    assert [len(outcome["kills"]) for outcome in outcomes.values()] == [2, 1]
    assert (runs / "killed-refilling" / "died").read_text() == "1"


@pytest.mark.parametrize("name", ["plain", "bounded"])
def test_what_is_asked_is_a_function_of_the_rewards(runs: Path, name: str) -> None:
    (run,) = (run for run in RUNS if run.name == name)
    config = parse_config(toy_settings(runs, run))
    source = PromptSource(config, load_tokenizer(runs / "policy"))
    for step in range(NUM_STEPS):
        rewards = rewards_of(runs, name, step)
        asked, number = [prompt.id for prompt in source.batch(step)], 0
        while number < config.train.refill_rounds:
            signals = sum(len(set(rewards[prompt])) > 1 for prompt in asked)
            if signals == GROUPS:
                break
            number += 1
            asked += [prompt.id for prompt in source.refill(step, number)[: GROUPS - signals]]
        assert Counter(asked) == Counter(rewards.keys())
        found = metrics(runs, name)[step]
        assert (found["rollout/refill_rounds"], found["rollout/dropped_groups"]) == (number, len(asked) - GROUPS)
        assert number > 0


def test_every_step_trains_on_as_many_groups_with_signal_as_it_has_prompts(runs: Path) -> None:
    def trained(name: str, step: int) -> set[int]:
        found = rows(runs, name, ["step", "prompt_id", "sample", "policy_logprobs"])
        return {row["prompt_id"] for row in found if row["step"] == step and row["policy_logprobs"] is not None}

    for step in range(NUM_STEPS):
        signal = {prompt for prompt, rewards in rewards_of(runs, "plain", step).items() if len(set(rewards)) > 1}
        assert len(signal) == GROUPS and trained("plain", step) <= signal
    assert len(trained("undisturbed", 0)) < GROUPS - 1
    assert len(trained("plain", 0)) > len(trained("undisturbed", 0))


def test_what_was_cut_off_is_punished_and_not_trained_on(runs: Path) -> None:
    found = rows(runs, "plain", [*COLUMNS, "policy_logprobs"])
    cut_off = [row for row in found if row["finish_reason"] == "length"]
    assert cut_off and all(row["policy_logprobs"] is None for row in cut_off)
    others = [rows(runs, name, [*COLUMNS, "policy_logprobs"]) for name in ("bounded", "undisturbed", "kept")]
    assert any(row["finish_reason"] == "length" and row["policy_logprobs"] for other in others for row in other)
    assert min(step["reward/overlong_penalty"] for step in metrics(runs, "plain")) < 0
    assert not any("reward/overlong_penalty" in step for step in metrics(runs, "bounded"))
