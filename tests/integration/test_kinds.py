"""Every kind of drafter is made, drafts, learns, changes no token, and drafts again from where it is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specrl.models.drafters import LAYERS as FEATURE_LAYERS
from specrl.models.families import TINY_VOCAB_SIZE
from specrl.step_record import read_steps
from tests.forks import run_module
from tests.integration.kind_runs import ADAPTED, KINDS, LAYERS, LORA, PUBLISHED

pytestmark = pytest.mark.engine
EXPORTED: dict[str, dict[str, Any]] = {
    LAYERS: {
        "num_hidden_layers": 3,
        FEATURE_LAYERS: [1, 3, 4, 6],
        "sliding_window": 16,
        "draft_vocab_size": TINY_VOCAB_SIZE,
    },
    PUBLISHED: {"fc_norm": True, "norm_output": True, "intermediate_size": 128, FEATURE_LAYERS: [0, 3]},
}
"""What the `config.json` of exported drafters says of their kind."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    run_module("tests.integration.kind_runs", folder)
    return folder


def stage_dir(runs: Path, kind: str, stage: str) -> Path:
    return runs / kind / "stages" / f"{stage}-0"


def result(runs: Path, kind: str, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stage_dir(runs, kind, stage) / "result.json").read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_and_learns_in_every_step_and_changes_no_token(runs: Path, kind: str) -> None:
    for record in read_steps(stage_dir(runs, kind, "train") / "steps"):
        assert record.metrics["spec/num_drafts"] > 0 < record.metrics["drafter/grad_norm"]
    validated = result(runs, kind, "validate")
    assert [pair["tokens_equal"] for pair in validated["speed"]] == [1.0]
    assert [validated["exactness"][way]["num_differences"] for way in ("sampled", "greedy")] == [0, 0]
    before, after = (
        load_file(Path(result(runs, kind, stage)["drafter_dir"]) / "model.safetensors")
        for stage in ("pretrain", "train")
    )
    drafts = ("mtp.", "model.mtp_") if "mtp" in str(KINDS[kind].get("speculation")) else ("fc.",)
    changed = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
    assert any(name.startswith(drafts) for name in changed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_drafter_is_of_its_kind_and_drafts_in_a_fresh_engine(runs: Path, kind: str) -> None:
    expected = result(runs, kind, "validate")["acceptance_length"]
    assert result(runs, kind, "export")["vllm_acceptance_length"] == pytest.approx(expected, rel=0.05) and expected > 1
    if kind in EXPORTED:
        config = json.loads((stage_dir(runs, kind, "export") / "drafter" / "config.json").read_text())
        assert {key: config[key] for key in EXPORTED[kind]} == EXPORTED[kind]


def test_adapters_are_exported_beside_the_policy_that_has_them(runs: Path) -> None:
    """As PEFT reads them: the policy before RL, which a warm start has trained by others, and these are the policy."""
    exported = stage_dir(runs, ADAPTED, "export")
    config = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (LORA["rank"], LORA["alpha"])
    assert config["base_model_name_or_path"] == result(runs, ADAPTED, "prepare")["policy_dir"]
    begun = load_file(Path(config["base_model_name_or_path"]) / "model.safetensors")
    adapters = load_file(exported / "adapter" / "adapter_model.safetensors")
    trained = load_file(exported / "policy" / "model.safetensors")
    modules = {name.removesuffix("weight"): name for name in begun if name.startswith("model.layers.")}
    pairs = {
        name: tuple(adapters.pop(f"base_model.model.{module}lora_{letter}.weight") for letter in "AB")
        for module, name in modules.items()
        if f"base_model.model.{module}lora_A.weight" in adapters
    }
    assert pairs and not adapters
    for name, (down, up) in pairs.items():
        assert not torch.equal(trained[name], begun[name])
        torch.testing.assert_close(trained[name], begun[name] + 2.0 * up @ down, atol=1e-6, rtol=0)
    assert torch.equal(trained["model.norm.weight"], begun["model.norm.weight"])
