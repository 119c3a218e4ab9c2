"""RL steps of a policy with experts, in FP32: speculation changes no token, and both engines choose alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specrl.schemas import read_folder
from specrl.step_record import read_steps
from tests.exactness.expert_steps import NUM_STEPS
from tests.integration.pipeline_runs import outside_of_engines

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]


def test_steps_with_experts_are_exact_and_route_alike(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.exactness.expert_steps", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=outside_of_engines(), capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    train = tmp_path / "eagle3" / "train"
    rollouts = [rollout for rollout in read_folder(train / "rollouts") if rollout.step == 0]
    assert [list(rollout.response_tokens) for rollout in rollouts] == json.loads((tmp_path / "plain.json").read_text())
    assert all(rollout.num_drafts > 0 for rollout in rollouts if len(rollout.response_tokens) > 2)
    records = read_steps(train / "steps")
    assert len(records) == NUM_STEPS
    for record in records:
        assert record.metrics["mismatch/routing_tokens"] == record.metrics["mismatch/routing_layers"] == 0.0
        assert record.metrics["mismatch/token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
        assert record.metrics["policy/grad_norm"] > 0
    # The probe after a refit had the engine's experts, too: where none are given, nothing is compared.
    probe = json.loads((tmp_path / "probe.json").read_text())
    assert probe == {"mismatch/routing_tokens": 0.0, "mismatch/routing_layers": 0.0}
