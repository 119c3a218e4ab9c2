"""LoRA on several ranks, and in RL steps that are killed, is LoRA on one rank and in a run without kills (FP32)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
import torch
from safetensors.torch import load_file

from tests.forks import run_module
from tests.integration.loop_plan import LoopRun
from tests.integration.lora_worker import FAMILIES
from tests.integration.policy_worker import LAYOUTS

PARALLEL = [name for name in LAYOUTS if name != "alone"]
NUM_STEPS = 6
SETTINGS = {
    "policy": {"lr": 1e-2, "lora": {"rank": 8, "alpha": 16}},
    "data": {"reward": "tests.exactness.rl_steps:share_of_vowels"},
    "train": {"num_steps": NUM_STEPS, "prompts_per_step": 8, "samples_per_prompt": 4},
}
RUNS = [LoopRun("undisturbed", settings=SETTINGS), LoopRun("killed", kills=2, settings=SETTINGS)]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    run_module("tests.integration.lora_worker", folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in RUNS]))
    run_module("tests.integration.loop_runs", folder, folder / "runs.json")
    return folder


def ranks_of(layouts: Path, kind: str, name: str) -> list[dict[str, Any]]:
    files = [layouts / f"{kind}-{name}-{rank}.pt" for rank in range(LAYOUTS[name][0])]
    return [torch.load(file, weights_only=False) for file in files]


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("kind", [*FAMILIES, "recompute"])
def test_updates_are_the_same_on_every_layout_and_from_another_ones_checkpoint(
    layouts: Path, kind: str, name: str
) -> None:
    """Mutation: without the sum over tensor-parallel ranks of the gradients of adapters that each of them has whole."""
    (alone,) = ranks_of(layouts, kind, "alone")
    for rank in ranks_of(layouts, kind, name):
        for found, expected in zip([*rank["metrics"], rank["again"]], [*alone["metrics"], alone["again"]], strict=True):
            assert found == pytest.approx(expected, rel=1e-4)
        moved = 0.0
        for key, tensor in alone["weights"].items():
            assert torch.equal(rank["begun"][key], alone["begun"][key])
            for found in (rank["weights"], rank["moved"]):
                torch.testing.assert_close(found[key], tensor, atol=2e-4, rtol=0, msg=key)
            moved = max(moved, float((tensor - alone["begun"][key]).abs().max()))
        assert moved > 1e-3


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_adapters_that_are_written_are_those_of_all_ranks(layouts: Path, family: str, name: str) -> None:
    rank = ranks_of(layouts, family, name)[0]
    adapters = load_file(layouts / family / f"{name}-adapter" / "adapter_model.safetensors")
    for key, tensor in rank["weights"].items():
        module = f"base_model.model.{key.removesuffix('weight')}"
        delta = torch.zeros(())
        if f"{module}lora_A.weight" in adapters:
            delta = 16 / 4 * adapters[f"{module}lora_B.weight"] @ adapters[f"{module}lora_A.weight"]
        torch.testing.assert_close(tensor, rank["begun"][key] + delta, atol=1e-5, rtol=0)


def trained(runs: Path, name: str, file: str = "policy/model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(runs / name / "train-toy" / file)


def rows(runs: Path, name: str) -> list[dict[str, Any]]:
    columns = ["step", "prompt_id", "sample", "response_tokens", "reward", "policy_logprobs"]
    table = pyarrow.dataset.dataset(runs / name / "train-toy" / "rollouts", format="ipc").to_table(columns=columns)
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["prompt_id"], row["sample"]))


@pytest.mark.engine
def test_a_run_that_is_killed_trains_the_same_adapters(runs: Path) -> None:
    assert len(json.loads((runs / "killed" / "outcome.json").read_text())["kills"]) == 2
    assert rows(runs, "killed") == rows(runs, "undisturbed")
    for file in ("policy/model.safetensors", "adapter/adapter_model.safetensors"):
        expected = trained(runs, "undisturbed", file)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in trained(runs, "killed", file).items())


@pytest.mark.engine
def test_rewards_rise_and_every_refit_is_checked(runs: Path) -> None:
    steps = sorted((runs / "undisturbed" / "train-toy" / "steps").glob("*.json"))
    metrics = [json.loads(path.read_text())["metrics"] for path in steps]
    assert len(metrics) == NUM_STEPS
    assert max(step["refit/max_abs_logprob_diff"] for step in metrics) < 1e-3
    assert not any(step["refit/drafter_reloads"] for step in metrics)
    rewards = [step["reward/mean"] for step in metrics]
    print(rewards)
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.05


@pytest.mark.engine
def test_the_trained_policy_is_the_one_before_with_the_adapters(runs: Path) -> None:
    begun, adapters = (
        load_file(runs / "policy" / "model.safetensors"),
        trained(runs, "killed", "adapter/adapter_model.safetensors"),
    )
    changed = 0
    for name, tensor in trained(runs, "killed").items():
        module = f"base_model.model.{name.removesuffix('weight')}"
        if f"{module}lora_A.weight" not in adapters:
            assert torch.equal(tensor, begun[name]), name
            continue
        delta = 16 / 8 * adapters[f"{module}lora_B.weight"] @ adapters[f"{module}lora_A.weight"]
        torch.testing.assert_close(tensor, begun[name] + delta, atol=1e-6, rtol=0)
        changed += 1
    assert 2 * changed == len(adapters)
