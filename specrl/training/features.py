"""Features: the detached results of the policy's forward pass that the drafter learns from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class FeatureSpec:
    """The features that a drafter needs from the policy."""

    layers: tuple[int, ...]
    """Layer indices. Index i means the residual stream that enters layer i, as in vLLM and SGLang; in a policy of n
    layers, index n means the one that leaves the last layer."""
    draft_tokens: Tensor
    """int64 `[draft_vocab]`, sorted: the target ids of the draft vocabulary. It is empty for a drafter that has the
    policy's head, and so can compute the policy's logits itself."""


@dataclass(frozen=True)
class Features:
    """The features of one micro-batch, in which every row is one sequence, padded on the right.

    Nothing here carries a gradient.
    """

    tokens: Tensor
    """int64 `[batch, seq]`: the token ids."""
    mask: Tensor
    """bool `[batch, seq]`: True at i where tokens[:, i + 1] is a response token; the last column is False."""
    hidden: Tensor
    """`[batch, seq, layers * hidden]` in the policy's compute type: the inputs of the chosen layers, concatenated."""
    target_logits: Tensor
    """`[batch, seq, draft_vocab]`: the policy's logits for the next token, on the draft vocabulary; 0 where `mask` is
    False."""
    target_top1: Tensor
    """int64 `[batch, seq]`: the most likely next token of the full vocabulary; 0 where `mask` is False."""
