"""GDPO on a reward of parts: whatever kills, drafts and ranks there are, rollouts store the same parts (FP32)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.dataset
import pytest
import torch
from safetensors.torch import load_file

from specrl.algorithms.advantages import group_advantages
from specrl.config.algorithms import ADVANTAGES
from tests.forks import run_module
from tests.integration.loop_plan import LoopRun

pytestmark = pytest.mark.engine
COLUMNS = ["step", "prompt_id", "sample", "seed", "response", "response_tokens", "reward", "reward_parts", "advantage"]
NUM_STEPS, WEIGHTS = 2, (1.0, 0.5)
PARTS = [
    {"name": "tests.integration.loop_plan:reward", "label": "odd"},
    {"name": "length", "weight": WEIGHTS[1], "parameters": {"target": 0, "limit": 60}},
]
SETTINGS = {
    "data": {"reward": PARTS},
    "train": {"algorithm": "gdpo", "num_steps": NUM_STEPS, "samples_per_prompt": 4, "prompts_per_step": 4},
}
PLAIN = {"speculation": {"method": "none", "k": 0}}
BOTH = {"speculation": {"method": "eagle3+replay"}, "bubbles": {"use": "both"}}
RUNS = [
    LoopRun("plain", settings={**SETTINGS, **PLAIN}),
    LoopRun("alone", ranks=1, settings={**SETTINGS, **PLAIN}),
    LoopRun("killed", kills=1, settings={**SETTINGS, **BOTH}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in RUNS]))
    run_module("tests.integration.loop_runs", folder, folder / "runs.json")
    return folder


def rows(runs: Path, name: str) -> list[dict[str, Any]]:
    table = pyarrow.dataset.dataset(runs / name / "train-toy" / "rollouts", format="ipc").to_table(columns=COLUMNS)
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["prompt_id"], row["sample"]))


def test_a_killed_run_stores_the_same_parts_and_ends_with_the_same_policy(runs: Path) -> None:
    assert len(json.loads((runs / "killed" / "outcome.json").read_text())["kills"]) == 1
    assert rows(runs, "killed") == rows(runs, "plain")
    expected = load_file(runs / "plain" / "train-toy" / "policy" / "model.safetensors")
    found = load_file(runs / "killed" / "train-toy" / "policy" / "model.safetensors")
    assert [key for key, tensor in found.items() if not torch.equal(tensor, expected[key])] == []


def test_the_parts_do_not_depend_on_the_ranks(runs: Path) -> None:
    expected = [row for row in rows(runs, "plain") if row["step"] == 0]
    assert [row for row in rows(runs, "alone") if row["step"] == 0] == expected


def test_rewards_and_advantages_are_functions_of_the_stored_parts(runs: Path) -> None:
    gdpo = ADVANTAGES.choose("gdpo")
    for step in range(NUM_STEPS):
        found = [row for row in rows(runs, "plain") if row["step"] == step]
        parts = [dict(row["reward_parts"]) for row in found]
        assert [part["odd"] for part in parts] == [len(row["response"]) % 2 for row in found]
        lengths = [max(0.0, (60 - len(row["response"])) / 60) for row in found]
        assert [part["length"] for part in parts] == pytest.approx(lengths)
        sums = [WEIGHTS[0] * part["odd"] + WEIGHTS[1] * part["length"] for part in parts]
        assert [row["reward"] for row in found] == pytest.approx(sums)
        columns, prompts = (
            [[part[name] for part in parts] for name in ("odd", "length")],
            [r["prompt_id"] for r in found],
        )
        advantages = group_advantages(sums, prompts, gdpo, columns, WEIGHTS)
        assert [row["advantage"] for row in found] == pytest.approx(advantages, rel=1e-4, abs=1e-6)
        assert any(advantages) and advantages != pytest.approx(group_advantages(sums, prompts, ADVANTAGES.default()))
        [path] = (runs / "plain" / "train-toy" / "steps").glob(f"step={step:06d}.json")
        metrics = json.loads(path.read_text())["metrics"]
        for name, column in zip(("odd", "length"), columns, strict=True):
            assert metrics[f"reward/part/{name}"] == pytest.approx(fmean(column))
