"""A policy comes nearer to a larger teacher of another family, in the same way with drafts and kills, and split by
tensor or pipeline parallelism of two ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specrl.config import ModelConfig
from specrl.models.tiny import write_tiny_model
from tests.forks import run_module
from tests.integration.loop_plan import LoopRun
from tests.integration.test_reference import PLAIN, rows

pytestmark = pytest.mark.engine
TINY = {"family": "qwen3", "num_layers": 8, "hidden_size": 192, "intermediate_size": 256}
"""The shape of a teacher that is larger than the toy policy. It is random, so that all tokens are about as likely."""

LAYOUTS = ("tensor", "pipeline")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    teacher = folder / "teacher"
    teacher.mkdir()
    write_tiny_model(ModelConfig.model_validate({"dtype": "float32", "max_length": 192, "tiny": TINY}), 3, teacher)
    taught: dict[str, dict[str, Any]] = {
        "policy": {"lr": 1e-3},
        "train": {"teacher": str(teacher), "advantage": "none", "num_steps": 3},
    }
    asked = [LoopRun("plain", settings={**PLAIN, **taught}), LoopRun("drafted-killed", kills=2, settings=taught)]
    for kind in LAYOUTS:
        split = {"policy": {f"{kind}_parallel": 2}, "train": {**taught["train"], "num_steps": 1}}
        asked.append(LoopRun(kind, settings={**PLAIN, **split}))
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in asked]))
    run_module("tests.integration.loop_runs", folder, folder / "runs.json")
    return folder


def divergences(runs: Path, name: str) -> list[float]:
    paths = sorted((runs / name / "train-toy" / "steps").glob("*.json"))
    return [json.loads(path.read_text())["metrics"]["policy/teacher_kl"] for path in paths]


def test_the_divergence_from_the_teacher_falls_in_every_step(runs: Path) -> None:
    first, second, third = divergences(runs, "plain")
    assert first > 1 and second < 0.95 * first and third < 0.95 * second


def test_drafts_and_kills_change_nothing(runs: Path) -> None:
    assert len(json.loads((runs / "drafted-killed" / "outcome.json").read_text())["kills"]) == 2
    assert rows(runs, "drafted-killed") == rows(runs, "plain")
    assert divergences(runs, "drafted-killed") == divergences(runs, "plain")
    weights = [load_file(runs / name / "train-toy/policy/model.safetensors") for name in ("plain", "drafted-killed")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_teacher_that_is_split_over_the_ranks_says_the_same(runs: Path, kind: str) -> None:
    assert divergences(runs, kind) == pytest.approx(divergences(runs, "plain")[:1], rel=1e-5)


def test_no_reward_is_learned_from(runs: Path) -> None:
    found = rows(runs, "plain")
    assert len({row["reward"] for row in found}) > 1 and not any(row["advantage"] for row in found)
