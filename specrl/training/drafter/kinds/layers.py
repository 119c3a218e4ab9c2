"""The building blocks of drafters, and `DraftModule`, the interface that the unroll in `drafter/ttt.py` drives.

There are two: EAGLE-3 (`eagle3.py`), and the multi-token-prediction layer of a policy that has one (`mtp.py`). Both run
their decoder layers, usually one, for each drafted token. Slot i holds token i + 1 and the policy's hidden state of
token i, at rotary position i, as in vLLM (`llm_base_proposer.set_inputs_first_pass` shifts the ids, not the positions).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specrl.models.checks.config import rope_of
from specrl.models.directory import EMBEDDINGS, FINAL_NORM, HEAD
from specrl.models.families import head_dim
from specrl.models.rope import rope_frequencies

CONFIG_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "rope": "rope_parameters",
    "max_position_embeddings": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
"""The fields of `DraftShape` that policies have too, by their names in `config.json`."""


@dataclass(frozen=True)
class DraftShape:
    """The sizes and constants that define a drafter's computation."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Mapping[str, Any]
    """The rotary embedding, as `rope_of` returns it."""
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    """The layers of the policy that it reads, by the indices of `Policy.train_step`."""
    dtype: torch.dtype
    """The policy's compute type, in which the engine runs the drafter too; parameters are float32 here."""
    num_layers: int = 1
    sliding_window: int | None = None
    """The number of positions that attention sees, including the query's own; None for all."""

    @classmethod
    def of(cls, hf_config: Any, draft_vocab_size: int, feature_layers: tuple[int, ...]) -> Self:
        """The shape of a drafter with one layer of the policy's own sizes."""
        own: dict[str, Any] = {"head_dim": head_dim(hf_config), "rope": rope_of(hf_config.to_dict())}
        others = {name: getattr(hf_config, key) for name, key in CONFIG_KEYS.items() if name not in own}
        return cls(
            **own,
            **others,
            draft_vocab_size=draft_vocab_size,
            feature_layers=feature_layers,
            dtype=hf_config.dtype or torch.bfloat16,
        )


class DraftModule(nn.Module, ABC):
    """The parameters of a drafter, and one drafting step in pieces, which `unroll` in `drafter/ttt.py` puts together.

    Tensors of the policy (`SHARED`) are held as copies that no gradient reaches.
    """

    SHARED: ClassVar[Mapping[str, str]] = {EMBEDDINGS: "embeddings", FINAL_NORM: "policy_norm", HEAD: "policy_head"}
    """The policy's tensors that drafting and its targets read: the name on disk to the attribute here."""
    embeddings: Tensor
    policy_norm: Tensor
    policy_head: Tensor
    """[draft_vocab, hidden]: the head's rows for the draft vocabulary."""
    policy_eps: float
    """That of the policy's norms; a drafter's own may have another."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        for attribute in self.SHARED.values():
            self.register_buffer(attribute, None, persistent=False)

    def name_on_disk(self, name: str) -> str:
        return name

    @torch.no_grad()
    def policy_logits(self, hidden: Tensor) -> Tensor:
        """The policy's logits on the draft vocabulary, `[..., draft_vocab]`, from its last layer's `[..., hidden]`."""
        return F.linear(self.policy_normed(hidden), self.policy_head)

    @torch.no_grad()
    def policy_normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.policy_norm.float(), self.policy_eps)

    @property
    @abstractmethod
    def attentions(self) -> Sequence[Attention]:
        """The attention of each decoder layer."""

    @abstractmethod
    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The normed embeddings `[n, hidden]` of tokens `[n]` in the slots `positions` `[n]`."""

    @abstractmethod
    def feed(self, features: Tensor) -> Tensor:
        """The substitute for the module's own output, `[n, hidden]`, given features `[n, layers * hidden]`."""

    @abstractmethod
    def enter(self, layer: int, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream `[n, hidden]` of a layer and the input of its attention `[n, width]`.

        `hidden` is the result of the previous layer's `finish`; for the first layer, that of `feed` in the first step,
        and the module's own output in later steps.
        """

    @abstractmethod
    def finish(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        """A layer's output `[n, hidden]`, given its attention's result `[n, heads, head_dim]`."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits `[n, draft_vocab]`, given the last layer's output `[n, hidden]`."""


def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS normalisation, computed in float32 and returned in the input's type, as in the engine."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """The projections of grouped-query attention over `width` channels, with optional biases and QK norms."""

    frequencies: Tensor

    def __init__(self, shape: DraftShape, width: int, *, bias: bool, qk_norm: bool = False) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = linear(width, shape.num_heads * shape.head_dim, bias=bias)
        self.k_proj = linear(width, kv_size, bias=bias)
        self.v_proj = linear(width, kv_size, bias=bias)
        self.o_proj = linear(shape.num_heads * shape.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else None
        frequencies, self.rope_scale = rope_frequencies(shape.rope, shape.head_dim, shape.max_position_embeddings)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated, scaled queries `[n, heads, head_dim]`, given inputs `[n, width]` and positions `[n]`."""
        q = self.q_proj(x).unflatten(-1, (self.shape.num_heads, self.shape.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        return self._rotate(q * self.shape.head_dim**-0.5, positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values, each `[n, kv_heads, head_dim]`; arguments are those of `queries`."""
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        keys = self.k_proj(x).unflatten(-1, heads)
        if self.k_norm is not None:
            keys = self.k_norm(keys)
        return self._rotate(keys, positions), self.v_proj(x).unflatten(-1, heads)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None].float() * self.frequencies
        cos, sin = (self.rope_scale * part[:, None] for part in (angles.cos(), angles.sin()))
        low, high = x.float().chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result
