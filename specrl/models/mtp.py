"""Models with multi-token-prediction layers: which are known, and how they are written.

One family: MiMo (Xiaomi, 2025), a Qwen2 with one more decoder layer that predicts the token after the next; the
smallest that vLLM's CPU build drafts with and whose trunk Megatron-core trains. Its checkpoints call themselves `mimo`
and bring remote code; here they are written as the Qwen2 that they are, under MiMo's architecture name, by which vLLM
goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrl.config.base import ConfigError

ARCHITECTURE = "MiMoForCausalLM"
PREFIX = "model.mtp_layers.0."
"""Of the layer's tensors in the policy's checkpoint."""
REMOTE_CODE_KEYS = ("auto_map", "attention_bias", "use_mrope")
"""Of MiMo's own configuration: code that is not needed, and what is so in every Qwen2."""


def has_mtp(config: Mapping[str, Any]) -> bool:
    """Whether `config.json` describes a model with a multi-token-prediction layer."""
    return bool(config.get("architectures") or []) and config["architectures"][0] == ARCHITECTURE


def check_mtp(config: Mapping[str, Any], directory: Path) -> None:
    """Refuse a MiMo that this project or vLLM would compute wrongly.

    Raises:
        ConfigError: one line on what it has and what is supported.
    """
    layers = config.get("num_nextn_predict_layers", 0)
    if layers != 1:
        raise ConfigError(
            f"{directory}: num_nextn_predict_layers = {layers}: vLLM drafts with one layer, so it must be 1"
        )
    if config.get("tie_word_embeddings", False):
        raise ConfigError(f"{directory}: a MiMo with tie_word_embeddings = true is not supported: vLLM wants its head")
    if (config.get("rope_scaling") or {}).get("rope_type", "default") != "default":
        raise ConfigError(f"{directory}: a MiMo with scaled rotary embeddings is not supported: remove rope_scaling")


def as_qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that transformers and vLLM read without remote code."""
    return {key: value for key, value in config.items() if key not in REMOTE_CODE_KEYS} | {"model_type": "qwen2"}
