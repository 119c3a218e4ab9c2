"""The dimensions of a model, known without loading it: from its directory, from `model.tiny`, or from a short table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.config import Config, ConfigError, ModelConfig
from specrl.models.checks.folder import check_directory
from specrl.models.families import FAMILIES, ExpertShape, Family, expert_shape, family_of, tiny_config
from specrl.models.sources import source_kind


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a decoder, from which its parameters and memory are computed."""

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool  # the output layer shares the embeddings' matrix
    max_positions: int
    num_experts: int = 0  # per layer; 0 where every layer has one MLP
    experts_per_token: int = 0
    expert_size: int = 0  # the width of one expert; `intermediate_size` then applies to no layer

    @property
    def query_size(self) -> int:
        """The channels of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The channels of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def heads_divide(self, ranks: int) -> bool:
        """Whether the attention heads can be divided among ranks, which may hold copies of KV heads."""
        return self.num_heads % ranks == 0 and max(self.num_kv_heads, ranks) % min(self.num_kv_heads, ranks) == 0

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden_size * self.expert_size

    @property
    def expert_parameters_per_layer(self) -> int:
        return self.num_experts * self.expert_parameters

    @property
    def linear_parameters_per_layer(self) -> int:
        """The weights to which FP8 applies: those of linear layers and experts, not of a router."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        mlp = 0 if self.num_experts else 3 * self.hidden_size * self.intermediate_size
        return attention + mlp + self.expert_parameters_per_layer

    def adapter_parameters_per_layer(self, rank: int, parts: int = 1) -> int:
        """The LoRA parameters on one of `parts` tensor-parallel ranks, for a model without experts."""
        split = 2 * self.query_size + 2 * self.kv_size + 3 * self.intermediate_size
        return rank * (7 * self.hidden_size + split // parts)

    @property
    def parameters_per_layer(self) -> int:
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.family.qk_norm else 0)
        bias = self.query_size + 2 * self.kv_size if self.family.qkv_bias else 0
        router = self.num_experts * self.hidden_size
        return self.linear_parameters_per_layer + router + norms + bias

    @property
    def active_mlp_size(self) -> int:
        """The width that computes each token after attention: the MLP's, or that of all the token's experts."""
        return self.experts_per_token * self.expert_size if self.num_experts else self.intermediate_size

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters except those of multi-token-prediction layers; a tied matrix counts once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.num_layers * self.parameters_per_layer + embeddings + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """All parameters except those of the experts that a token does not use."""
        idle = self.num_experts - self.experts_per_token
        return self.parameters - self.num_layers * idle * self.expert_parameters


KNOWN_SHAPES = {
    "smollm2-135m": ModelShape(FAMILIES["llama"], 30, 576, 1536, 9, 3, 64, 49152, True, 8192),
    "Qwen/Qwen3-8B": ModelShape(FAMILIES["qwen3"], 36, 4096, 12288, 32, 8, 128, 151936, False, 40960),
    "Qwen/Qwen3-8B-Base": ModelShape(FAMILIES["qwen3"], 36, 4096, 12288, 32, 8, 128, 151936, False, 32768),
    "Qwen/Qwen3-32B": ModelShape(FAMILIES["qwen3"], 64, 5120, 25600, 64, 8, 128, 151936, False, 40960),
    "Qwen/Qwen3-30B-A3B": ModelShape(
        FAMILIES["qwen3_moe"], 48, 2048, 6144, 32, 4, 128, 151936, False, 40960, 128, 8, 768
    ),
    "Qwen/Qwen3-30B-A3B-Base": ModelShape(
        FAMILIES["qwen3_moe"], 48, 2048, 6144, 32, 4, 128, 151936, False, 32768, 128, 8, 768
    ),
    "Qwen/Qwen3-235B-A22B": ModelShape(
        FAMILIES["qwen3_moe"], 94, 4096, 12288, 64, 4, 128, 151936, False, 40960, 128, 8, 1536
    ),
}
"""Models that can be planned before they are downloaded."""


def model_shape(model: ModelConfig) -> ModelShape:
    """The shape of `model.source`, without loading it."""
    if model.source == "tiny":
        return shape_of(tiny_config(model))
    if model.source in KNOWN_SHAPES:
        return KNOWN_SHAPES[model.source]
    if source_kind(model.source) == "directory":
        return shape_of(check_directory(Path(model.source), model.max_length))
    raise ConfigError(
        f'model.source = "{model.source}" is neither a directory nor a model whose shape is known '
        f"({', '.join(KNOWN_SHAPES)}): run `hf download {model.source} --local-dir DIR` and set model.source=DIR"
    )


def teacher_shape(config: Config) -> ModelShape | None:
    """The shape of `train.teacher`; None without one, or if its folder is unreadable, which `check_teacher` reports."""
    directory = config.train.teacher
    try:
        return None if directory is None else shape_of(check_directory(directory, config.model.max_length))
    except ConfigError:
        return None


def shape_of(hf: dict[str, Any]) -> ModelShape:
    """The shape that a Hugging Face configuration describes."""
    heads, experts = hf["num_attention_heads"], expert_shape(hf) or ExpertShape(0, 0, 0)
    return ModelShape(
        family=family_of(hf),
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        vocab_size=hf["vocab_size"],
        tied=bool(hf.get("tie_word_embeddings", False)),
        max_positions=hf.get("max_position_embeddings", 2048),
        num_experts=experts.num_experts,
        experts_per_token=experts.per_token,
        expert_size=experts.intermediate_size,
    )
