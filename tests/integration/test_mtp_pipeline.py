"""The native path from prepare to export: a policy that drafts with its own multi-token-prediction layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.pipeline_runs import finish, rollouts, run_smoke
from tests.mtp_models import PREFIX

pytestmark = pytest.mark.pipeline
THREE_LAYERS = ("--set", "model.tiny.family=mimo", "--set", "model.tiny.mtp_layers=3")
"""As many as the drafts have tokens; vLLM drafts all of them with the first layer."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; its folder."""
    runs_dir = tmp_path_factory.mktemp("mtp") / "runs"
    output = finish(run_smoke(runs_dir, "--set", "speculation.method=mtp", *THREE_LAYERS))
    assert '{"method": "mtp", "num_speculative_tokens": 3}' in output
    return runs_dir / "smoke"


def test_the_layer_drafts_from_the_first_step_to_the_export(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["speculation"]["method"] == "mtp"
    assert summary["speculation"]["acceptance_length"] > 1.2
    assert summary["refit"] == {**summary["refit"], "checks": 4, "failures": 0}
    exported = summary["export"]["vllm_acceptance_length"]
    assert exported == pytest.approx(summary["speculation"]["acceptance_length"], rel=0.05)
    assert sum(row["num_accepted_tokens"] for row in rollouts(run_dir, "num_accepted_tokens")) > 0


def test_it_changes_no_token(run_dir: Path) -> None:
    result = json.loads(next(run_dir.glob("stages/validate-*/result.json")).read_text())
    assert [pair["tokens_equal"] for pair in result["speed"]] == [1.0, 1.0]
    for kind in ("sampled", "greedy"):
        assert result["exactness"][kind]["num_differences"] == 0


def test_the_layer_is_exported_as_it_was_trained_along_with_the_policy(run_dir: Path) -> None:
    before = load_file(next(run_dir.glob("stages/prepare-*/policy/model.safetensors")))
    after = load_file(run_dir / "export" / "policy" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert any(name.startswith(PREFIX) for name in changed)
    assert any(name.startswith("model.mtp_layers.2.") for name in after.keys() - changed)
    assert not any(name.startswith(("model.mtp_layers.1.", "model.mtp_layers.2.")) for name in changed)
    assert any(not name.startswith(PREFIX) for name in changed)
