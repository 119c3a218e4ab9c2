"""The first multi-token-prediction layer of a policy that has any, as vLLM drafts with it.

One decoder layer of the policy's family after a projection of two normed inputs: a hidden state h, and the embedding e
of the token after it. h is the policy's last hidden state, or the layer's own normed output in later draft steps. The
family's `MtpModule` gives the order of the two, and says whether h has passed the policy's final norm, and whether e is
zero in slot 0. Embeddings and head are the policy's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specrl.models.families import Family
from specrl.training.drafter.kinds.layers import MLP, Attention, DraftModule, DraftShape, RMSNorm, linear


def mtp_shape(hf_config: Any) -> DraftShape:
    """The shape of a policy's layer, which drafts over the whole vocabulary from the last hidden state."""
    return DraftShape.of(hf_config, hf_config.vocab_size, (hf_config.num_hidden_layers,))


class Mtp(DraftModule):
    """The layer; embeddings, final norm and head are copies of the policy's."""

    def __init__(self, shape: DraftShape, family: Family) -> None:
        super().__init__(shape)
        assert family.mtp is not None
        self.layout = family.mtp
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.token_layernorm = RMSNorm(hidden, eps)
        self.hidden_layernorm = RMSNorm(hidden, eps)
        self.input_proj = linear(2 * hidden, hidden)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(shape, hidden, bias=family.qkv_bias, qk_norm=family.qk_norm)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(shape)
        self.final_layernorm = RMSNorm(hidden, eps) if self.layout.final_norm is not None else None

    def name_on_disk(self, name: str) -> str:
        return self.layout.name_on_disk(name)

    @property
    def attentions(self) -> tuple[Attention]:
        return (self.self_attn,)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded = self.embeddings[tokens]
        if self.layout.masks_first:
            embedded = embedded.masked_fill(positions[:, None] == 0, 0)
        normed: Tensor = self.token_layernorm(embedded)
        return normed

    def feed(self, features: Tensor) -> Tensor:
        return self.policy_normed(features) if self.layout.reads_normed else features

    def enter(self, layer: int, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.hidden_layernorm(hidden), embedded]
        residual: Tensor = self.input_proj(torch.cat(parts[::-1] if self.layout.token_first else parts, -1))
        return residual, self.input_layernorm(residual)

    def finish(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output if self.final_layernorm is None else self.final_layernorm(output)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.policy_head)
