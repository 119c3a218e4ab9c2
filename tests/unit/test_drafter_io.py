from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specrl.config import Config, DrafterConfig
from specrl.rollout.errors import RefitError
from specrl.rollout.vllm.engine.arguments import engine_arguments
from specrl.rollout.vllm.precision import EnginePrecision
from specrl.rollout.vllm.weights.load import check_own_head
from specrl.training.drafter.io import read_drafter
from specrl.training.drafter.trainer import Drafter
from tests.unit.test_drafter import ALONE, DRAFT_VOCAB, VOCAB, make_drafter, make_features, write_policy


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"), "bfloat16")


@pytest.fixture
def saved(policy_dir: Path, tmp_path: Path) -> tuple[Drafter, Path]:
    drafter = make_drafter(policy_dir)
    drafter.update([make_features(drafter, [(3, 9), (6, 3)])], lr=1e-3)
    drafter.save(tmp_path / "drafter", policy_version=7)
    return drafter, tmp_path / "drafter"


def test_saved_drafter_loads_with_the_same_rounded_weights(saved: tuple[Drafter, Path], policy_dir: Path) -> None:
    drafter, directory = saved
    loaded = Drafter.load(directory, policy_dir, DrafterConfig(), ALONE)
    assert torch.equal(loaded.draft_tokens, drafter.draft_tokens)
    for name, tensor in drafter.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor.bfloat16().float()), name


def test_file_has_the_published_names_and_types(saved: tuple[Drafter, Path]) -> None:
    drafter, directory = saved
    tensors = load_file(directory / "model.safetensors")
    attention = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"]
    mlp = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norms = [f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    assert set(tensors) == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *attention, *mlp, *norms}
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert dict(drafter.named_weights()).keys() == tensors.keys()


def test_d2t_holds_offsets(saved: tuple[Drafter, Path]) -> None:
    drafter, directory = saved
    tensors = load_file(directory / "model.safetensors")
    assert torch.equal(tensors["d2t"] + torch.arange(DRAFT_VOCAB), drafter.draft_tokens)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], drafter.draft_tokens)


def test_an_engine_refuses_token_ids_in_the_place_of_offsets(saved: tuple[Drafter, Path], policy_dir: Path) -> None:
    drafter, directory = saved
    config = Config(name="drafter")
    start = partial(engine_arguments, config, policy_dir, directory, 0, 3, EnginePrecision(config.precision, None))
    assert start(alone=True)["speculative_config"]["model"] == str(directory)
    path = directory / "model.safetensors"
    save_file(load_file(path) | {"d2t": drafter.draft_tokens}, path)
    with pytest.raises(ValueError, match=rf"the drafter in {directory}: d2t\[\d+\] = \d+ makes .* allowed are 0 to 49"):
        start(alone=True)


def test_config_states_every_flag(saved: tuple[Drafter, Path]) -> None:
    config = json.loads((saved[1] / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB, DRAFT_VOCAB)
    for flag in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "attention_bias", "mlp_bias"):
        assert config[flag] is False
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    assert config["specrl_policy_version"] == 7


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no d2t", "lacks d2t"),
        ("d2t of other tokens", "d2t and t2d disagree; it holds values from .* the ids of tokens go from 0 to 49"),
        ("no fc", "lacks fc.weight"),
        ("norm of a flag that is off", "has input_norm.weight"),
        ("flag without its norm", r"lacks fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
        ("other width", r"fc.weight is \[32, 64\], its config.json says \[32, 96\]"),
        ("bias", "attention_bias = True"),
        ("gated by gelu", "hidden_act = 'gelu'"),
        ("other rotary embedding", 'rope_type = "dynamic"'),
        ("other policy", "hidden_size = 64, and the policy has hidden_size = 32"),
        ("layers that do not ascend", r"layers \[3, 1, 5\]"),
        ("layers that the policy lacks", r"layers \[1, 3, 7\]"),
        ("another kind", "architectures is"),
        ("a layer of Qwen3", "model_type = 'qwen3'"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    saved: tuple[Drafter, Path], policy_dir: Path, damage: str, message: str
) -> None:
    directory = saved[1]
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    changes: dict[str, dict[str, Any]] = {
        "flag without its norm": {"fc_norm": True},
        "bias": {"attention_bias": True},
        "gated by gelu": {"hidden_act": "gelu"},
        "other rotary embedding": {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None},
        "other policy": {"hidden_size": 64},
        "layers that do not ascend": {"eagle_aux_hidden_state_layer_ids": [3, 1, 5]},
        "layers that the policy lacks": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
        "another kind": {"architectures": ["EagleLlamaModel"]},
        "a layer of Qwen3": {"model_type": "qwen3"},
    }
    if damage in ("no d2t", "no fc"):
        del tensors["d2t" if damage == "no d2t" else "fc.weight"]
    elif damage == "d2t of other tokens":
        tensors["d2t"][0] += 1
    elif damage == "norm of a flag that is off":
        tensors["input_norm.weight"] = torch.ones(96)
    elif damage == "other width":
        tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | changes.get(damage, {})))
    with pytest.raises(ValueError, match=message) as caught:
        read_drafter(directory, policy_dir)
    assert "\n" not in str(caught.value)


def test_a_drafter_of_the_whole_vocabulary_has_no_mappings(policy_dir: Path, tmp_path: Path) -> None:
    config = DrafterConfig(draft_vocab_size=VOCAB, num_layers=2, feature_layers=(2, 5))
    drafter = Drafter.create(policy_dir, config, torch.arange(VOCAB), ALONE)
    drafter.save(tmp_path, policy_version=0)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not {"d2t", "t2d"} & set(tensors)
    assert "layers.1.mlp.up_proj.weight" in tensors and tensors["lm_head.weight"].shape[0] == VOCAB
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["num_hidden_layers"], written["num_aux_hidden_states"]) == (2, 2)
    loaded = Drafter.load(tmp_path, policy_dir, config, ALONE)
    assert torch.equal(loaded.draft_tokens, torch.arange(VOCAB))
    assert dict(loaded.named_weights()).keys() == tensors.keys()


def test_a_head_that_the_engine_took_from_the_policy_is_not_loaded() -> None:
    drafter, policy = torch.nn.Module(), torch.nn.Module()
    drafter.lm_head, policy.lm_head = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    check_own_head(drafter, policy, frozenset({"lm_head.weight"}))
    drafter.lm_head = policy.lm_head
    check_own_head(drafter, policy, frozenset({"fc.weight"}))
    with pytest.raises(RefitError, match="drafts with the policy's head"):
        check_own_head(drafter, policy, frozenset({"lm_head.weight"}))


def test_a_missing_directory_is_a_clear_error(policy_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no drafter in"):
        read_drafter(tmp_path / "nowhere", policy_dir)
