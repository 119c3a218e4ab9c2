"""The multi-token-prediction layer of a policy that has one, as vLLM and the published checkpoints have it (MiMo).

One Qwen2 decoder layer after a projection of two normed inputs, in this order:
`input_proj([hidden_layernorm(h), token_layernorm(e)])`. h is the policy's residual stream after its last layer, before
its final norm, or the layer's own normed output when it drafts on; e is the embedding of the token after it, zero in
slot 0. Embeddings and head are the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from specrl.models.families import MIMO_LAYER
from specrl.training.drafter.layers import EMBEDDINGS, MLP, Attention, DraftModule, DraftShape, RMSNorm, linear

NORM, HEAD = "model.norm.weight", "lm_head.weight"


def mtp_shape(hf_config: Any) -> DraftShape:
    """Return the shape of a policy's layer, which drafts over the whole vocabulary from the last hidden state.

    Args:
        hf_config: Transformers' configuration object of the policy.
    """
    return DraftShape.of(
        hf_config,
        draft_vocab_size=hf_config.vocab_size,
        feature_layers=(hf_config.num_hidden_layers,),
        intermediate_size=None,
    )


class Mtp(DraftModule):
    """The layer; embeddings, final norm and head are copies of the policy's."""

    PREFIX: ClassVar[str] = MIMO_LAYER.prefix
    SHARED: ClassVar[Mapping[str, str]] = {EMBEDDINGS: "embeddings", NORM: "norm", HEAD: "head"}

    embeddings: Tensor
    norm: Tensor
    head: Tensor

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.token_layernorm = RMSNorm(hidden, eps)
        self.hidden_layernorm = RMSNorm(hidden, eps)
        self.input_proj = linear(2 * hidden, hidden)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(shape, hidden, bias=True)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(shape)
        self.final_layernorm = RMSNorm(hidden, eps)

    @property
    def policy_head(self) -> Callable[[Tensor], Tensor]:
        return self._policy_logits

    @property
    def attentions(self) -> tuple[Attention]:
        return (self.self_attn,)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedded: Tensor = self.token_layernorm(self.embeddings[tokens].masked_fill(positions[:, None] == 0, 0))
        return embedded

    def feed(self, features: Tensor) -> Tensor:
        return features

    def enter(self, layer: int, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        residual: Tensor = self.input_proj(torch.cat([self.hidden_layernorm(hidden), embedded], -1))
        return residual, self.input_layernorm(residual)

    def finish(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        output: Tensor = self.final_layernorm(hidden + self.mlp(self.post_attention_layernorm(hidden)))
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)

    @torch.no_grad()
    def _policy_logits(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps)
        return F.linear((wide * scale * self.norm.float()).to(hidden.dtype), self.head)
