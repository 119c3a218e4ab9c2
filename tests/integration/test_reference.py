"""The reference of the KL penalty is renewed and outlives a restart, and a penalty in the reward changes advantages."""

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

pytestmark = pytest.mark.engine
COLUMNS = ["step", "prompt_id", "sample", "seed", "response_tokens", "reward", "advantage"]
PENALTY = {"kl_coef": 0.1, "num_steps": 4}
RENEWED = {**PENALTY, "reference_every": 2}
PLAIN = {"speculation": {"method": "none", "k": 0}}
RUNS = [
    LoopRun("first", settings={**PLAIN, "train": PENALTY}),
    LoopRun("renewed", settings={**PLAIN, "train": RENEWED}),
    LoopRun("renewed-left", leaves=True, settings={**PLAIN, "train": RENEWED}),
    LoopRun("in-reward", settings={**PLAIN, "train": {**PENALTY, "kl_in": "reward", "kl_estimator": "k1"}}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in RUNS]))
    run_module("tests.integration.loop_runs", folder, folder / "runs.json")
    return folder


def rows(runs: Path, name: str) -> list[dict[str, Any]]:
    table = pyarrow.dataset.dataset(runs / name / "train-toy" / "rollouts", format="ipc").to_table(columns=COLUMNS)
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["prompt_id"], row["sample"]))


def kl(runs: Path, name: str) -> list[float]:
    paths = sorted((runs / name / "train-toy" / "steps").glob("*.json"))
    return [json.loads(path.read_text())["metrics"]["policy/kl"] for path in paths]


def policy(runs: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(runs / name / "train-toy" / "policy" / "model.safetensors")


def differs(runs: Path, name: str, other: str) -> bool:
    weights = policy(runs, other)
    return not all(torch.equal(tensor, weights[key]) for key, tensor in policy(runs, name).items())


def test_the_divergence_is_counted_from_the_last_renewal(runs: Path) -> None:
    first, renewed = kl(runs, "first"), kl(runs, "renewed")
    assert [value > 0 for value in first] == [False, True, True, True]
    assert [value > 0 for value in renewed] == [False, True, False, True]
    assert renewed[:2] == first[:2] and renewed[3] < first[3]
    assert differs(runs, "renewed", "first")


def test_a_restart_after_every_step_has_the_reference_of_the_step(runs: Path) -> None:
    assert json.loads((runs / "renewed-left" / "outcome.json").read_text())["num_starts"] == 4
    assert rows(runs, "renewed-left") == rows(runs, "renewed")
    assert kl(runs, "renewed-left") == kl(runs, "renewed")
    assert not differs(runs, "renewed-left", "renewed")


def test_a_penalty_in_the_reward_is_no_part_of_the_reported_one(runs: Path) -> None:
    penalised, others = rows(runs, "in-reward"), rows(runs, "first")
    first = [(left, right) for left, right in zip(penalised, others, strict=True) if left["step"] == 0]
    assert all(left["reward"] == right["reward"] for left, right in first)
    later = [row for row in penalised if row["step"] == 3]
    flat = [row for row in later if len({o["reward"] for o in later if o["prompt_id"] == row["prompt_id"]}) == 1]
    assert flat and any(row["advantage"] for row in flat)  # by the penalty alone
    assert kl(runs, "in-reward")[3] != 0
