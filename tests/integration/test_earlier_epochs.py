"""Responses of earlier epochs are drafts when their prompt comes again, and change no token (FP32)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

from tests.integration.loop_plan import LoopRun
from tests.integration.pipeline_runs import outside_of_engines

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
NUM_PROBLEMS, NUM_STEPS = 8, 4
"""An epoch is two steps."""
SPEECH = ["step", "prompt_id", "sample", "seed", "response_tokens", "reward", "advantage"]
TEXT = ["step", "prompt_id", "sample", "num_stored", "own_stored_tokens"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("epochs")
    rows = [{"prompt": f"{number} + {number}", "answer": str(2 * number)} for number in range(NUM_PROBLEMS)]
    for name in ("problems", "held-out"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = [{"prompt": f"{number} - 1", "answer": str(number - 1)} for number in range(NUM_PROBLEMS)]
    data = {
        "source": "file",
        "path": str(folder / "problems.jsonl"),
        "validation_path": str(folder / "held-out.jsonl"),
        "reward": "tests.integration.loop_plan:reward",
    }
    shape = {"num_steps": NUM_STEPS, "prompts_per_step": NUM_PROBLEMS // 2, "samples_per_prompt": 4}
    drafted = {
        "data": data,
        "train": {**shape, "checkpoint_every": 1},
        "speculation": {"method": "replay", "adaptive": False, "recent_tokens": 0},
    }
    plan = [
        LoopRun("plain", settings={"data": data, "train": shape, "speculation": {"method": "none", "k": 0}}),
        LoopRun("epochs", settings=drafted),
        LoopRun("left", leaves=True, settings=drafted),
        LoopRun("generated", settings={**drafted, "data": {"num_problems": NUM_PROBLEMS}}),
        LoopRun("beside-bubbles", settings={**drafted, "bubbles": {"use": "pregenerate"}}),
    ]
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in plan]))
    command = [sys.executable, "-m", "tests.integration.loop_runs", str(folder), str(folder / "runs.json")]
    environment = {**outside_of_engines(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def rollouts(runs: Path, name: str, columns: list[str]) -> list[dict[str, Any]]:
    table = pyarrow.dataset.dataset(runs / name / "train-toy" / "rollouts", format="ipc").to_table(columns=columns)
    return sorted(table.to_pylist(), key=lambda row: (row["step"], row["prompt_id"], row["sample"]))


@pytest.mark.parametrize("name", ["epochs", "left", "beside-bubbles"])
def test_drafts_from_earlier_epochs_change_no_token(runs: Path, name: str) -> None:
    expected = rollouts(runs, "plain", SPEECH)
    assert len(expected) == NUM_STEPS * NUM_PROBLEMS // 2 * 4
    assert rollouts(runs, name, SPEECH) == expected


@pytest.mark.parametrize("name", ["epochs", "generated"])
def test_the_second_epoch_drafts_from_the_first(runs: Path, name: str) -> None:
    found = rollouts(runs, name, [*TEXT, "num_draft_tokens", "num_accepted_tokens"])
    first = [row for row in found if row["step"] < NUM_STEPS // 2]
    second = [row for row in found if row["step"] >= NUM_STEPS // 2]
    assert {row["prompt_id"] for row in first} == {row["prompt_id"] for row in second}
    assert all(row["num_stored"] == row["num_draft_tokens"] == 0 for row in first)
    assert all((row["num_stored"], row["own_stored_tokens"]) == (4, 0) for row in second)
    assert sum(row["num_accepted_tokens"] for row in second) > 0


def test_a_restart_finds_the_same_texts(runs: Path) -> None:
    """Of the run that left after every step, each step is another process's."""
    assert rollouts(runs, "left", TEXT) == rollouts(runs, "epochs", TEXT)


def test_text_of_the_next_steps_own_seeds_stands_beside_it(runs: Path) -> None:
    found = rollouts(runs, "beside-bubbles", TEXT)
    assert all(row["num_stored"] >= 4 for row in found if row["step"] >= NUM_STEPS // 2)
