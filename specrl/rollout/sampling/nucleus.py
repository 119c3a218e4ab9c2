"""Top-k and top-p for many rows at once: each comes down to a least probability, and tokens below it are dropped."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""The number of tokens in a block. Rows are summed and searched block by block."""
RANKS = (128, 1024)
"""How many of the most probable tokens are sorted: the first number for every row with top-k or top-p, the second for
rows that this does not settle. Rows that need still more are worked on one by one."""
TOO_CLOSE = 2.0**-18
"""The relative distance of a cumulative mass from the mass asked for within which a row is left to
`least_probability`. FP32 sums over a block are exact to this (63 roundings of 2^-24) in whatever order they are taken,
so that the result for a row does not depend on what else is in the batch."""


def most_probable(probs: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return `probs` with zeros below each row's least probability, [rows, vocab], and the least probabilities [rows].

    Args:
        probs: [rows, vocab] FP32, of any sum.
        top_k: [rows] int64 on the CPU; 0 is all tokens.
        top_p: [rows] FP32 on the CPU; 1 is all tokens.
    """
    parts = blocks(probs)
    maxima = parts.amax(-1)
    least = _least_probabilities(probs, parts, maxima, top_k, top_p)
    kept = torch.zeros_like(parts)
    row, block = (maxima >= least[:, None]).nonzero(as_tuple=True)  # the others have nothing to keep
    values = parts[row, block]
    kept[row, block] = values.masked_fill_(values < least[row, None], 0)
    return kept.flatten(1)[:, : probs.shape[1]], least


def _least_probabilities(probs: Tensor, parts: Tensor, maxima: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return `least_probability` of every row, [rows], exact to the bit; 0 for rows with neither top-k nor top-p."""
    least = probs.new_zeros(len(probs))
    waiting = torch.nonzero((top_k > 0) | (top_p < 1)).flatten().to(probs.device)
    numbers, shares = top_k.to(probs.device), top_p.to(probs.device)
    for ranks in (min(ranks, probs.shape[1]) for ranks in RANKS):
        if not len(waiting):
            break
        rows = slice(None) if len(waiting) == len(probs) else waiting
        part = parts[rows]
        highest, mass = _highest(part, maxima[rows], ranks), part.sum(-1).sum(-1, dtype=torch.float64)
        found, settled = _by_rank(highest, mass, numbers[rows], shares[rows], probs.shape[1])
        least[waiting[settled]] = found[settled]
        waiting = waiting[~settled]
    for row in waiting.tolist():
        least[row] = least_probability(probs[row], int(top_k[row]), float(top_p[row]))
    return least


def _highest(parts: Tensor, maxima: Tensor, ranks: int) -> Tensor:
    """Return the `ranks` largest values of each row, sorted; they lie in the `ranks` blocks with the largest maxima."""
    if ranks < maxima.shape[1]:
        chosen = torch.topk(maxima, ranks, sorted=False).indices
        parts = parts[torch.arange(len(parts), device=parts.device)[:, None], chosen]
    return torch.topk(parts.flatten(1), ranks).values


def _by_rank(highest: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Return least probabilities [rows], and for which rows [rows] they follow from the largest values alone.

    Args:
        highest: [rows, ranks], the largest values of each row in descending order.
        mass: [rows] FP64, the sum of the whole row.
    """
    ranks = highest.shape[1]
    cumulative = highest.double().cumsum(-1)
    limited, nucleus = (top_k > 0) & (top_k < vocab), top_p < 1
    last = highest.gather(1, (top_k.clamp(1, ranks) - 1)[:, None])  # [rows, 1], the k-th
    kept = (highest >= last).sum(-1, keepdim=True)
    # There may be more tokens tied with the k-th beyond the ranks; those of probability 0 have no mass.
    unknown = (kept[:, 0] == ranks) & (last[:, 0] > 0) if ranks < vocab else torch.zeros_like(limited)
    mass = torch.where(limited, cumulative.gather(1, kept - 1)[:, 0], mass)
    target = (mass * top_p)[:, None]
    inside = torch.searchsorted(cumulative, target)  # [rows, 1], the first rank that reaches the target
    close = ((cumulative - target).abs() <= TOO_CLOSE * target).any(-1)
    unsettled = limited & (top_k > ranks) | nucleus & (close | (inside[:, 0] == ranks) | limited & unknown)
    least = torch.where(limited, last[:, 0], torch.zeros_like(last[:, 0]))
    return torch.where(nucleus, highest.gather(1, inside.clamp(max=ranks - 1))[:, 0], least), ~unsettled


def least_probability(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the least probability, a scalar tensor, that top-k and top-p leave in a row `probs` [vocab].

    It sorts candidates instead of the vocabulary. For top-k, the k-th largest block maximum is at most the k-th largest
    value. For top-p, values below (1 - top_p) / n of the mass sum up to less than 1 - top_p of it, so none is needed.
    """
    if 0 < top_k < probs.shape[0]:
        maxima = blocks(probs[None])[0].amax(-1)
        if top_k <= maxima.shape[0]:
            probs = probs[probs >= torch.topk(maxima, top_k).values[-1]]
        probs = probs[probs >= torch.topk(probs, top_k).values[-1]]
    if top_p >= 1:
        return probs.amin()
    mass = probs.sum(dtype=torch.float64)
    candidates = probs[probs >= (1 - top_p) * mass / probs.shape[0]].sort(descending=True).values
    inside = torch.searchsorted(candidates.double().cumsum(0), mass * top_p)
    return candidates[inside.clamp(max=candidates.shape[0] - 1)]


def blocks(probs: Tensor) -> Tensor:
    """Return `probs` [rows, vocab] as [rows, blocks, BLOCK], with the last block filled up with zeros."""
    rest = -probs.shape[1] % BLOCK
    return (torch.nn.functional.pad(probs, (0, rest)) if rest else probs).view(probs.shape[0], -1, BLOCK)
