"""A run with an FP8 KV cache that was stopped goes on with the scales it had, token for token (FP32)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specrl.rollout.vllm.precision import has_fp8_kv_cache
from specrl.schemas import Rollout, read_rollouts
from tests.integration.loop_plan import LoopRun
from tests.integration.pipeline_runs import outside_of_engines

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "precision": {"kv_cache": "fp8", "max_token_mult_prob_error": 1e6},
    "engine": {"parity_tolerance": 1e6},  # the first scales are far off on purpose
    "speculation": {"adaptive": False},
}
RUNS = [LoopRun("whole", ranks=1, settings=SETTINGS), LoopRun("stopped", ranks=1, settings=SETTINGS, resumes="whole")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not has_fp8_kv_cache():
        pytest.skip("vLLM has no FP8 KV cache on this device")
    folder = tmp_path_factory.mktemp("resume")
    (folder / "runs.json").write_text(json.dumps([asdict(run) for run in RUNS]))
    command = [sys.executable, "-m", "tests.integration.loop_runs", str(folder), str(folder / "runs.json")]
    environment = {**outside_of_engines(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def rollouts(run_dir: Path, step: int) -> list[Rollout]:
    return read_rollouts(run_dir / "train-toy" / "rollouts" / f"step={step:06d}" / "rank-0000.arrow")


def kv_scales(run_dir: Path, step: int) -> dict[str, list[float]]:
    manifest = json.loads((run_dir / "train-toy" / "checkpoints" / f"step={step:06d}" / "manifest.json").read_text())
    scales: dict[str, list[float]] = manifest["kv_scales"]
    return scales


def test_the_rest_of_the_run_is_the_same(runs: Path) -> None:
    whole, stopped = runs / "whole", runs / "stopped"
    assert (stopped / "ready-0").read_text() == "2"  # it began with the last step
    for left, right in zip(rollouts(whole, 2), rollouts(stopped, 2), strict=True):
        assert left.response_tokens == right.response_tokens
        assert left.generation_logprobs == right.generation_logprobs
    weights = load_file(whole / "train-toy" / "policy" / "model.safetensors")
    found = load_file(stopped / "train-toy" / "policy" / "model.safetensors")
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, found[name])] == []


def test_scales_are_measured_in_every_step_and_stored(runs: Path) -> None:
    first, second = kv_scales(runs / "whole", 2), kv_scales(runs / "whole", 3)
    assert first == kv_scales(runs / "stopped", 2)
    assert second == kv_scales(runs / "stopped", 3)
    assert max(first["k"] + first["v"]) < 0.25  # no longer what was calibrated
    assert first != second
