"""The EAGLE-3 drafter as a torch module, with the parameter names of the published checkpoints.

One Llama layer whose attention reads the concatenation of a token's embedding and a feature of the token before it
(Li et al., EAGLE-3, arXiv:2503.01840). Slot i holds token i + 1 beside the policy's hidden state of token i, at rotary
position i: this is what vLLM feeds (`llm_base_proposer.set_inputs_first_pass` shifts the ids, not the positions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MAX_SCORES = 1 << 26
"""Attention scores kept at once; beyond it queries go in chunks that the backward pass recomputes."""


@dataclass(frozen=True)
class Eagle3Shape:
    """Everything that fixes the drafter's computation."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[int, int, int]
    dtype: torch.dtype
    """The policy's compute type, in which the engine runs the drafter too; parameters are float32 here."""

    @classmethod
    def from_policy(cls, hf_config: Any, draft_vocab_size: int, intermediate_size: int | None) -> Eagle3Shape:
        """Shape of a drafter for a policy with this Hugging Face config (Llama, Qwen2 or Qwen3 dense).

        The drafter is Llama-shaped whatever the policy is: no QKV bias, no QK norm, plain rotary embedding.

        Raises:
            ValueError: fewer than 4 layers, or a draft vocabulary that is not smaller than the policy's.
        """
        if draft_vocab_size >= hf_config.vocab_size:
            raise ValueError(
                f"draft vocabulary of {draft_vocab_size} tokens must be below the policy's {hf_config.vocab_size}"
                " (vLLM shares the policy's head with a drafter of the full vocabulary)"
            )
        return cls(
            hidden_size=hf_config.hidden_size,
            intermediate_size=intermediate_size or hf_config.intermediate_size,
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=hf_config.num_key_value_heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads,
            rms_norm_eps=hf_config.rms_norm_eps,
            rope_theta=float(hf_config.rope_parameters["rope_theta"]),
            max_position_embeddings=hf_config.max_position_embeddings,
            vocab_size=hf_config.vocab_size,
            draft_vocab_size=draft_vocab_size,
            feature_layers=feature_layers(hf_config.num_hidden_layers),
            dtype=hf_config.dtype or torch.bfloat16,
        )


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The published default (2, n // 2, n - 3), or (1, n // 2, n - 1) where a shallow policy makes two of them equal.

    vLLM drops repeated indices, so equal ones would change the width of the features.
    """
    if num_layers < 4:
        raise ValueError(f"an EAGLE-3 drafter needs a policy of at least 4 layers, this one has {num_layers}")
    layers = (2, num_layers // 2, num_layers - 3)
    return layers if layers[0] < layers[1] < layers[2] else (1, num_layers // 2, num_layers - 1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class RMSNorm(nn.Module):
    """RMS normalisation in float32, result in the input's type (as the engine does)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = _linear(2 * shape.hidden_size, shape.num_heads * shape.head_dim)
        self.k_proj = _linear(2 * shape.hidden_size, kv_size)
        self.v_proj = _linear(2 * shape.hidden_size, kv_size)
        self.o_proj = _linear(shape.num_heads * shape.head_dim, shape.hidden_size)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """`[n, 2 * hidden]` and `[n]` to rotated, scaled queries `[n, heads, head_dim]`."""
        q = self.q_proj(x).unflatten(-1, (self.shape.num_heads, self.shape.head_dim))
        return rotate(q * self.shape.head_dim**-0.5, positions, self.shape.rope_theta)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[n, 2 * hidden]` and `[n]` to rotated keys and values, each `[n, kv_heads, head_dim]`."""
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        keys = rotate(self.k_proj(x).unflatten(-1, heads), positions, self.shape.rope_theta)
        return keys, self.v_proj(x).unflatten(-1, heads)


class MLP(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = _linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)

    def inputs(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads: `[n, hidden]` twice to `[n, 2 * hidden]`. `embeddings` have passed input_layernorm."""
        return torch.cat([embeddings, self.hidden_norm(hidden)], -1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """From the attention's result `[n, heads, head_dim]` to the layer's output `[n, hidden]`.

        The residual is `hidden` before its norm: `norm_before_residual = false` in the config on disk.
        """
        hidden = hidden + self.self_attn.o_proj(attended.flatten(-2))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3(nn.Module):
    """Parameters of the drafter; `training_time_test` in `ttt.py` runs them. Embeddings belong to the policy."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = _linear(3 * shape.hidden_size, shape.hidden_size)
        self.midlayer = Layer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = _linear(shape.hidden_size, shape.draft_vocab_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """Layer output `[n, hidden]` to draft-vocabulary logits `[n, draft_vocab]`."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding (halves rotated, as Llama does) of `[n, heads, head_dim]` at `positions [n]`."""
    size = x.shape[-1]
    frequencies = theta ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def chain_attention(queries: Tensor, keys: list[Tensor], values: list[Tensor], visible: Tensor) -> Tensor:
    """Attention of drafting chains at one step: each sees the context up to its start, and itself.

    Args:
        queries: `[batch, chains, heads, head_dim]`, scaled.
        keys: of the context `[batch, slots, kv_heads, head_dim]`, then of each later step of the chains themselves
            `[batch, chains, kv_heads, head_dim]`; a chain sees only its own.
        values: as `keys`.
        visible: bool `[batch, chains, slots]`: the slots before or at the chain's start.

    Returns:
        `[batch, chains, heads, head_dim]`
    """
    batch, chains, heads, _ = queries.shape
    chunk = max(1, MAX_SCORES // (batch * heads * visible.shape[-1]))
    if chunk >= chains:
        return _attend(queries, visible, *keys, *values)
    parts = []
    for start in range(0, chains, chunk):
        part = slice(start, start + chunk)
        own = [tensors[0:1] + [tensor[:, part] for tensor in tensors[1:]] for tensors in (keys, values)]
        parts.append(checkpoint(_attend, queries[:, part], visible[:, part], *own[0], *own[1], use_reentrant=False))
    return torch.cat(parts, 1)


def _attend(queries: Tensor, visible: Tensor, *keys_values: Tensor) -> Tensor:
    steps = len(keys_values) // 2
    batch, chains, _, size = queries.shape
    # Query heads that share a key head lie in the row dimension, so that keys are never repeated.
    kv_heads = keys_values[0].shape[2]
    q = queries.reshape(batch, chains, kv_heads, -1, size).permute(0, 2, 3, 1, 4)  # [batch, kv, group, chains, dim]
    keys, values = ([t.transpose(1, 2) for t in part] for part in (keys_values[:steps], keys_values[steps:]))
    rows = q.flatten(2, 3)  # [batch, kv, group * chains, dim]
    context = (rows @ keys[0].transpose(-1, -2)).view(*q.shape[:-1], -1).float()
    # Finite, so that rows without a chain (padding) stay free of NaN.
    scores = [context.masked_fill(~visible[:, None, None], -1e9)]
    scores += [(q * key[:, :, None]).sum(-1, keepdim=True).float() for key in keys[1:]]
    weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
    slots = visible.shape[-1]
    result = (weights[..., :slots].flatten(2, 3) @ values[0]).view_as(q)
    for step, value in enumerate(values[1:]):
        result = result + weights[..., slots + step, None] * value[:, :, None]
    return result.permute(0, 3, 1, 2, 4).flatten(2, 3)
