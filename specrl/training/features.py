"""What the policy's forward pass leaves for the drafter: detached features of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FeatureSpec:
    """Which features the drafter asks of the policy."""

    layers: tuple[int, ...]
    """Layer indices; index i means the residual stream that enters layer i (as in vLLM and SGLang), n the one that
    leaves the last of n."""
    draft_tokens: Tensor
    """int64 `[draft_vocab]`, sorted: target ids of the draft vocabulary; empty for a drafter that has the policy's head
    and so can compute the policy's logits itself."""


@dataclass(frozen=True)
class Features:
    """Features of one micro-batch; every row is one sequence, right-padded. Nothing here carries a gradient."""

    tokens: Tensor
    """int64 `[batch, seq]`."""
    mask: Tensor
    """bool `[batch, seq]`: True at i where tokens[:, i + 1] is a response token; the last column is False."""
    hidden: Tensor
    """`[batch, seq, layers * hidden]` in the policy's compute type: inputs of `FeatureSpec.layers`, concatenated."""
    target_logits: Tensor
    """`[batch, seq, draft_vocab]`: the policy's logits for the next token, on the draft vocabulary."""
    target_top1: Tensor
    """int64 `[batch, seq]`: argmax of the policy's logits over the full vocabulary."""
