"""The EAGLE-3 drafter as a torch module, with the parameter names of the published checkpoints.

One Llama layer whose attention reads the concatenation of a token's embedding and a feature of the token before it
(Li et al., EAGLE-3, arXiv:2503.01840).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specrl.training.drafter.layers import MLP, Attention, DraftModule, DraftShape, RMSNorm, linear


@dataclass(frozen=True)
class Eagle3Shape(DraftShape):
    """The shape of an EAGLE-3 drafter."""

    @classmethod
    def from_policy(cls, hf_config: Any, draft_vocab_size: int, intermediate_size: int | None) -> Eagle3Shape:
        """Return the shape of a drafter for a policy.

        The drafter is a Llama whatever the policy's family is: no biases, no QK norm, plain rotary embedding.

        Args:
            hf_config: Transformers' configuration object of the policy.
            draft_vocab_size: The number of tokens that can be drafted.
            intermediate_size: The width of the drafter's MLP; the policy's where it is None.

        Raises:
            ValueError: The policy has fewer than 4 layers, or no more tokens than the draft vocabulary.
        """
        if draft_vocab_size >= hf_config.vocab_size:
            raise ValueError(
                f"draft vocabulary of {draft_vocab_size} tokens must be below the policy's {hf_config.vocab_size}"
                " (vLLM shares the policy's head with a drafter of the full vocabulary)"
            )
        return cls.of(
            hf_config,
            draft_vocab_size=draft_vocab_size,
            feature_layers=feature_layers(hf_config.num_hidden_layers),
            intermediate_size=intermediate_size,
        )


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers of an n-layer policy whose inputs are the drafter's features.

    They are the published default (2, n // 2, n - 3), or (1, n // 2, n - 1) where a shallow policy makes two of those
    equal: vLLM drops repeated indices, so that equal ones would change the width of the features.

    Raises:
        ValueError: The policy has fewer than 4 layers.
    """
    if num_layers < 4:
        raise ValueError(f"an EAGLE-3 drafter needs a policy of at least 4 layers, this one has {num_layers}")
    layers = (2, num_layers // 2, num_layers - 3)
    return layers if layers[0] < layers[1] < layers[2] else (1, num_layers // 2, num_layers - 1)


class Layer(nn.Module):
    """The drafter's one transformer layer, whose attention reads an embedding beside a feature."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size, bias=False)
        self.mlp = MLP(shape)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output `[n, hidden]` for the attention's result `[n, heads, head_dim]`."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(-2))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3(DraftModule):
    """The drafter, with embeddings that are a copy of the policy's."""

    embeddings: Tensor

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape)
        self.fc = linear(3 * shape.hidden_size, shape.hidden_size)
        self.midlayer = Layer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, shape.draft_vocab_size)

    @property
    def attention(self) -> Attention:
        return self.midlayer.self_attn

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded: Tensor = self.midlayer.input_layernorm(self.embeddings[tokens])
        return embedded

    def feed(self, features: Tensor) -> Tensor:
        fed: Tensor = self.fc(features)
        return fed

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return `hidden` before its norm as the residual: `norm_before_residual = false` in the config on disk."""
        return hidden, torch.cat([embedded, self.midlayer.hidden_norm(hidden)], -1)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        return self.midlayer.finish(residual, attended)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits
