"""Top-k and top-p of many rows: each amounts to a least logit, below which tokens are dropped."""

from __future__ import annotations

import torch
from torch import Tensor


def is_limited(top_k: Tensor, top_p: Tensor, vocab: int) -> Tensor:
    """Whether top-k or top-p may drop a token of each row, bool [rows]."""
    return (top_k > 0) & (top_k < vocab) | (top_p < 1)


def least_kept(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least logit that is kept, FP32 [rows]: -inf without top-k and top-p.

    Args:
        logits: [rows, vocab] FP32.
        weights: [rows, vocab] FP32, proportional to the probabilities; integers, so that sums of them are exact.
        top_k: [rows] int64; 0 is all tokens.
        top_p: [rows] FP32; 1 is all tokens.
    """
    highest, tokens = logits.sort(descending=True)
    cumulative = weights.gather(1, tokens).cumsum(-1, dtype=torch.float64)
    vocab, k, p = logits.shape[1], top_k[:, None], top_p[:, None]
    last = highest.gather(1, torch.where((k > 0) & (k < vocab), k, vocab) - 1)  # [rows, 1], the k-th
    kept = (highest >= last).sum(-1, keepdim=True)
    inside = torch.searchsorted(cumulative, cumulative.gather(1, kept - 1) * p)  # the first token to reach its share
    nucleus = highest.gather(1, inside.clamp(max=vocab - 1))
    return torch.where(p < 1, nucleus, torch.where(kept < vocab, last, -torch.inf))[:, 0]
