"""The EAGLE-3 drafter as a torch module, with the parameter names of the published checkpoints.

Llama layers; the attention of the first reads the concatenation of a token's embedding and a feature of the token
before it (Li et al., EAGLE-3, arXiv:2503.01840). Published drafters have only this layer, `midlayer`; layers above it,
`layers.1` and so on, are ordinary ones, as in vLLM. Flags add norms; `fc_norm` and `norm_output` are EAGLE-3.1's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from specrl.models.drafters import LAYERS, NORM_FLAGS
from specrl.training.drafter.kinds.layers import CONFIG_KEYS, MLP, Attention, DraftModule, DraftShape, RMSNorm, linear

EAGLE3_KEYS = {
    **CONFIG_KEYS,
    "num_layers": "num_hidden_layers",
    "draft_vocab_size": "draft_vocab_size",
    **{flag: flag for flag in NORM_FLAGS},
}
"""The fields of `Eagle3Shape` in every drafter's `config.json`, by their names there."""


@dataclass(frozen=True)
class Eagle3Shape(DraftShape):
    norm_before_residual: bool = False
    """Whether the residual stream begins after the feature's norm instead of before it."""
    norm_before_fc: bool = False
    """Whether the policy's concatenated hidden states pass one norm before `fc`."""
    fc_norm: bool = False
    """Whether each of these hidden states passes its own norm before `fc`."""
    norm_output: bool = False
    """Whether the drafter continues from its output after the final norm instead of before it."""

    @classmethod
    def from_policy(
        cls,
        hf_config: Any,
        draft_vocab_size: int,
        intermediate_size: int | None,
        *,
        num_layers: int = 1,
        chosen_layers: tuple[int, ...] | None = None,
        sliding_window: int | None = None,
    ) -> Eagle3Shape:
        """A Llama without biases and QK norms; raise ValueError if the policy has too few tokens or layers."""
        if draft_vocab_size > hf_config.vocab_size:
            size = hf_config.vocab_size
            raise ValueError(f"draft vocabulary of {draft_vocab_size} tokens: the policy has only {size}")
        if chosen_layers is not None and chosen_layers[-1] > hf_config.num_hidden_layers:
            count = hf_config.num_hidden_layers
            raise ValueError(f"drafter.feature_layers = {list(chosen_layers)}: the policy has only {count} layers")
        shape = cls.of(hf_config, draft_vocab_size, chosen_layers or feature_layers(hf_config.num_hidden_layers))
        width = intermediate_size or shape.intermediate_size
        return replace(shape, intermediate_size=width, num_layers=num_layers, sliding_window=sliding_window)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype) -> Eagle3Shape:
        """The shape of an existing drafter, from its `config.json` as returned by `specrl.models.drafters.suited`."""
        fields = {name: config[key] for name, key in EAGLE3_KEYS.items()}
        return cls(**fields, feature_layers=tuple(config[LAYERS]), sliding_window=config["sliding_window"], dtype=dtype)


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers of an n-layer policy whose inputs are the drafter's features.

    They are the published default (2, n // 2, n - 3), or (1, n // 2, n - 1) if a shallow policy makes two of those
    equal: vLLM drops repeated indices, which would change the width of the features.
    """
    if num_layers < 4:
        raise ValueError(f"an EAGLE-3 drafter needs a policy of at least 4 layers, this one has {num_layers}")
    layers = (2, num_layers // 2, num_layers - 3)
    return layers if layers[0] < layers[1] < layers[2] else (1, num_layers // 2, num_layers - 1)


class Layer(nn.Module):
    """A Llama layer whose attention reads `width` channels."""

    def __init__(self, shape: Eagle3Shape, width: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, width, bias=False)
        self.mlp = MLP(shape)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output `[n, hidden]`, given the attention's result `[n, heads, head_dim]`."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(-2))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class FirstLayer(Layer):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Eagle3(DraftModule):
    """The drafter, with embeddings that are a copy of the policy's."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape)
        self.norm_before_residual, self.norm_output = shape.norm_before_residual, shape.norm_output
        size, eps, count = shape.hidden_size, shape.rms_norm_eps, len(shape.feature_layers)
        self.input_norm = RMSNorm(count * size, eps) if shape.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(count)) if shape.fc_norm else None
        self.fc = linear(count * size, size)
        self.midlayer = FirstLayer(shape)
        above = {str(number): Layer(shape, size) for number in range(1, shape.num_layers)}
        self.layers = nn.ModuleDict(above)
        self._stack: list[Layer] = [self.midlayer, *above.values()]
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, shape.draft_vocab_size)

    @property
    def attentions(self) -> list[Attention]:
        return [layer.self_attn for layer in self._stack]

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded: Tensor = self.midlayer.input_layernorm(self.embeddings[tokens])
        return embedded

    def feed(self, features: Tensor) -> Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fed: Tensor = self.fc(features)
        return fed

    def enter(self, layer: int, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if layer:
            return hidden, self._stack[layer].input_layernorm(hidden)
        normed = self.midlayer.hidden_norm(hidden)
        return normed if self.norm_before_residual else hidden, torch.cat([embedded, normed], -1)

    def finish(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        hidden = self._stack[layer].finish(residual, attended)
        is_last = layer == len(self._stack) - 1
        return self.norm(hidden) if self.norm_output and is_last else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden if self.norm_output else self.norm(hidden))
        return logits
