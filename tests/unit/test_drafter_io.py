from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specrl.config import DrafterConfig
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
    [("ids instead of offsets", "offsets"), ("no d2t", "lacks d2t"), ("norm flag", "norm_before_residual")],
)
def test_damaged_drafter_is_refused(saved: tuple[Drafter, Path], damage: str, message: str) -> None:
    directory = saved[1]
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    if damage == "ids instead of offsets":
        tensors["d2t"] += torch.arange(DRAFT_VOCAB)
    elif damage == "no d2t":
        del tensors["d2t"]
    else:
        del config["norm_before_residual"]
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_drafter(directory)


def test_missing_directory_and_other_policy_are_clear_errors(saved: tuple[Drafter, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no drafter in"):
        read_drafter(tmp_path / "nowhere")
    config = json.loads((saved[1] / "config.json").read_text())
    (saved[1] / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}))
    with pytest.raises(ValueError, match="eagle_aux_hidden_state_layer_ids"):
        Drafter.load(saved[1], write_policy(tmp_path / "policy"), DrafterConfig(), ALONE)
