"""The EAGLE-3 directory that vLLM and SGLang load: `config.json` and `model.safetensors`.

`d2t` is an *offset*: target id = draft id + d2t[draft id]. Flags on whose default loaders disagree
(`norm_before_residual`, `norm_before_fc`, biases) are written out, never left to a default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specrl.artifacts import write_json
from specrl.models.directory import CONFIG_FILE, WEIGHTS_FILE
from specrl.models.hf_io import TensorReader, write_tensors
from specrl.training.drafter.layers import DraftShape

ARCHITECTURE = "LlamaForCausalLMEagle3"
MAPPINGS = ("d2t", "t2d")


def draft_to_target_offsets(draft_tokens: Tensor) -> Tensor:
    """Return the offsets that are stored as `d2t`, given the target ids, int64 `[draft_vocab]`."""
    return draft_tokens - torch.arange(len(draft_tokens), device=draft_tokens.device)


def target_ids(offsets: Tensor) -> Tensor:
    """Return the target ids, given the offsets that are stored as `d2t`, int64 `[draft_vocab]`."""
    return offsets + torch.arange(len(offsets), device=offsets.device)


def vocabulary_tensors(draft_tokens: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t`, int64 `[draft_vocab]`, and `t2d`, bool `[vocab]`, as they are stored on disk.

    Args:
        draft_tokens: The target ids, int64 `[draft_vocab]`.
        vocab_size: The number of tokens of the policy.
    """
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool, device=draft_tokens.device)
    is_drafted[draft_tokens] = True
    return {"d2t": draft_to_target_offsets(draft_tokens), "t2d": is_drafted}


def config_dict(shape: DraftShape, policy_config: Any, policy_version: int) -> dict[str, Any]:
    """Return the contents of a drafter's `config.json`.

    Args:
        policy_config: Transformers' configuration object of the policy.
        policy_version: The version of the policy that the drafter was trained with.
    """
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "bos_token_id": policy_config.bos_token_id,
        "eos_token_id": policy_config.eos_token_id,
        "torch_dtype": str(shape.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
        "fc_norm": False,
        "target_hidden_size": shape.hidden_size,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": list(shape.feature_layers),
        "specrl_policy_version": policy_version,
    }


def write_drafter(directory: Path, config: dict[str, Any], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write an EAGLE-3 directory; `config.json` comes last, so that a directory which has one is complete."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).unlink(missing_ok=True)
    write_tensors(directory / WEIGHTS_FILE, dict(weights))
    write_json(directory / CONFIG_FILE, config)


def read_drafter(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Read an EAGLE-3 directory.

    Returns:
        The contents of its `config.json`, its parameters by name, and the target ids of its draft vocabulary, int64
        `[draft_vocab]`.

    Raises:
        ValueError: It is no EAGLE-3 directory, is incomplete, or has a setting that this module does not compute.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"no drafter in {directory}: {CONFIG_FILE} is missing")
    config: dict[str, Any] = json.loads(path.read_text())
    if config.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"{path}: architectures is {config.get('architectures')}, expected [{ARCHITECTURE!r}]")
    for flag in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "attention_bias"):
        if config.get(flag) is not False:
            raise ValueError(f"{path}: {flag} must be false, written out; found {config.get(flag)}")
    tensors = dict(TensorReader(directory).items())
    missing = [name for name in MAPPINGS if name not in tensors]
    if missing:
        raise ValueError(f"{directory / WEIGHTS_FILE} lacks {', '.join(missing)}: drafts could not be mapped to tokens")
    draft_tokens = target_ids(tensors.pop("d2t"))
    if not torch.equal(tensors.pop("t2d").nonzero()[:, 0], draft_tokens):
        raise ValueError(f"{directory / WEIGHTS_FILE}: d2t and t2d disagree; d2t must hold offsets, not ids")
    return config, tensors, draft_tokens
