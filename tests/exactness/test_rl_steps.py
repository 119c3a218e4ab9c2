"""A whole training with speculation is, in FP32, the training without it; and the drafter leaves the policy alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specrl.schemas import Rollout, read_rollouts
from tests.exactness.rl_steps import METHODS, NUM_STEPS, SWAPPED
from tests.integration.pipeline_runs import outside_of_engines

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process of its own: Megatron's groups stay for as long as a process lives."""
    folder = tmp_path_factory.mktemp("rl-steps")
    command = [sys.executable, "-m", "tests.exactness.rl_steps", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=outside_of_engines(), capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def rollouts(folder: Path, method: str) -> list[Rollout]:
    paths = sorted((folder / method / "train" / "rollouts").glob("step=*/rank-*.arrow"))
    return [rollout for path in paths for rollout in read_rollouts(path)]


def test_rollouts_and_rewards_are_the_same_with_and_without_speculation(folder: Path) -> None:
    plain, speculative = (rollouts(folder, method) for method in METHODS)
    assert len(plain) == NUM_STEPS * 4 * 4
    assert len({rollout.reward for rollout in plain}) > 10
    for left, right in zip(plain, speculative, strict=True):
        assert (left.step, left.seed, left.response_tokens) == (right.step, right.seed, right.response_tokens)
        assert (left.reward, left.advantage) == (right.reward, right.advantage)
    assert sum(rollout.num_accepted_tokens for rollout in speculative) > 20
    assert sum(rollout.num_drafts for rollout in plain) == 0


def test_so_is_the_policy_after_five_steps(folder: Path) -> None:
    plain, speculative, start = (load_file(folder / name) for name in weight_files())
    assert plain.keys() == speculative.keys()
    differing = {
        name: float((tensor - speculative[name]).abs().max())
        for name, tensor in plain.items()
        if not torch.equal(tensor, speculative[name])
    }
    assert differing == {}
    assert any(not torch.equal(tensor, start[name]) for name, tensor in plain.items() if name in start)


def weight_files() -> list[str]:
    return [*(f"{method}.safetensors" for method in METHODS), "policy/model.safetensors"]


def test_the_drafters_loss_leaves_every_policy_gradient_at_zero(folder: Path) -> None:
    gradients = json.loads((folder / "gradients.json").read_text())
    assert len(gradients) > 20
    assert set(gradients.values()) == {None}


def test_tensors_swapped_on_their_way_to_the_engine_are_named(folder: Path) -> None:
    found = json.loads((folder / "swapped.json").read_text())
    assert "the engine's policy differs from the trainer's in" in found["error"]
    assert all(name in found["error"] for name in SWAPPED)
