"""Top-k and top-p for many rows at once: each comes down to a least logit, and tokens below it are dropped."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""The number of tokens in a block: the most probable tokens are looked for in the blocks with the largest maxima."""
RANKS = (128, 1024)
"""How many of the most probable tokens are sorted: the first number for every row with top-k or top-p, the second for
rows that this does not settle. For rows that need still more the whole vocabulary is sorted."""


def is_limited(top_k: Tensor, vocab: int) -> Tensor:
    """Return for which rows [rows] top-k may drop a token."""
    return (top_k > 0) & (top_k < vocab)


def least_kept(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the least logit that is kept, FP32 [rows]: -inf without top-k and top-p.

    Args:
        logits: [rows, vocab] FP32.
        weights: [rows, vocab] FP32, proportional to the probabilities; integers, so that sums of them are exact.
        top_k: [rows] int64; 0 is all tokens.
        top_p: [rows] FP32; 1 is all tokens.
    """
    least = torch.full_like(logits[:, 0], -torch.inf)
    vocab = logits.shape[1]
    waiting = torch.nonzero(is_limited(top_k, vocab) | (top_p < 1)).flatten()
    for ranks in (*(ranks for ranks in RANKS if ranks < vocab), vocab):
        if not len(waiting):
            break
        found, settled = _by_rank(logits[waiting], weights[waiting], top_k[waiting], top_p[waiting], ranks)
        least[waiting[settled]] = found[settled]
        waiting = waiting[~settled]
    return least


def _by_rank(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    vocab = logits.shape[1]
    tokens = _highest(logits, ranks)
    highest, cumulative = logits.gather(1, tokens), weights.gather(1, tokens).cumsum(-1, dtype=torch.float64)
    limited, nucleus = is_limited(top_k, vocab), top_p < 1
    last = highest.gather(1, (top_k.clamp(1, ranks) - 1)[:, None])  # [rows, 1], the k-th
    kept = (highest >= last).sum(-1, keepdim=True)
    # There may be more tokens tied with the k-th beyond the ranks.
    unknown = kept[:, 0] == ranks if ranks < vocab else torch.zeros_like(limited)
    mass = torch.where(limited, cumulative.gather(1, kept - 1)[:, 0], weights.sum(-1, dtype=torch.float64))
    inside = torch.searchsorted(cumulative, (mass * top_p)[:, None])  # [rows, 1], the first rank that reaches its share
    unsettled = limited & (top_k > ranks) | nucleus & ((inside[:, 0] == ranks) | limited & unknown)
    least = torch.where(limited, last[:, 0], torch.full_like(last[:, 0], -torch.inf))
    return torch.where(nucleus, highest.gather(1, inside.clamp(max=ranks - 1))[:, 0], least), ~unsettled


def _highest(logits: Tensor, ranks: int) -> Tensor:
    num_blocks = -(-logits.shape[1] // BLOCK)
    padding = 0, num_blocks * BLOCK - logits.shape[1]
    parts = torch.nn.functional.pad(logits, padding, value=-torch.inf).view(-1, num_blocks, BLOCK)
    if ranks >= parts.shape[1]:
        return torch.topk(logits, ranks).indices
    blocks = torch.topk(parts.amax(-1), ranks, sorted=False).indices
    candidates = parts.gather(1, blocks[:, :, None].expand(-1, -1, BLOCK)).flatten(1)
    found = torch.topk(candidates, ranks).indices
    return blocks.gather(1, found // BLOCK) * BLOCK + found % BLOCK
