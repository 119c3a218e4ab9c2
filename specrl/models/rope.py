"""Rotary embeddings as transformers and vLLM compute them: plain, or scaled for longer contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rope_frequencies(rope: Mapping[str, Any], head_dim: int, positions: int) -> tuple[Tensor, float]:
    """The angle per position of each pair of channels, float32 `[head_dim / 2]`, and the factor on cos and sin.

    `rope` is what `rope_of` returns, and `positions` the model's `max_position_embeddings`.
    """
    if rope["rope_type"] == "default":
        theta = float(rope["rope_theta"])
        return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters=dict(rope),
    )
    with torch.device("cpu"):  # even while a model's parameters are created without memory
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(scale)
