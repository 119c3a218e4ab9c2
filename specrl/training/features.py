"""Features: the detached results of the policy's forward pass from which the drafter learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

NOT_SAMPLED = -1
"""The value of `Features.target_top1` if an environment wrote the next token, which is neither drafted nor learned."""
PARTS = ("tokens", "mask", "hidden", "target_top1")


@dataclass(frozen=True)
class Window:
    """The part of a sequence whose features are kept, and the rank that keeps them."""

    start: int
    stop: int
    owner: int = 0
    """The number of the rank that keeps the features, among the ranks that hold the policy together
    (`Policy.model_rank`)."""


@dataclass(frozen=True)
class Features:
    """The features of one micro-batch, in which every row is one sequence or a part of it, padded on the right.

    Nothing here carries a gradient.
    """

    tokens: Tensor
    mask: Tensor
    """bool `[batch, seq]`: True at i where tokens[:, i + 1] is a response token; the last column is False."""
    hidden: Tensor
    """`[batch, seq, layers * hidden]` in the policy's compute type: the residual streams that enter the chosen layers,
    concatenated. The last one leaves the last layer: the drafter computes the policy's logits from it, which would take
    far more memory."""
    target_top1: Tensor
    """int64 `[batch, seq]`: the most likely next token of the full vocabulary; 0 where `mask` is False, and NOT_SAMPLED
    where the policy did not sample the next token."""
    starts: Tensor
    """int64 `[batch]`: the position of each row's first token in its sequence."""

    def choose(self, rows: Sequence[int]) -> Features:
        chosen = list(rows)
        return self._of(lambda tensor: tensor[chosen])

    def row(self, row: int, length: int) -> Features:
        return self._of(lambda tensor: tensor[row : row + 1, :length].clone())

    def _of(self, rows: Callable[[Tensor], Tensor]) -> Features:
        starts = rows(self.starts[:, None])[:, 0]
        return Features(**{part: rows(getattr(self, part)) for part in PARTS}, starts=starts)


def sequences(features: Features) -> list[Features]:
    """The sequences of a micro-batch that have something to draft, one by one and without padding."""
    masks = [(row, mask) for row, mask in enumerate(features.mask) if int(mask.sum()) >= 2]
    return [features.row(row, int(mask.nonzero()[-1]) + 2) for row, mask in masks]


def padded(rows: Sequence[Features]) -> Features:
    """One micro-batch of single sequences, each in its own row, so that none attends to another."""
    width = max(row.tokens.shape[1] for row in rows)
    stacked = {part: _stack([getattr(row, part) for row in rows], width) for part in PARTS}
    return Features(**stacked, starts=torch.cat([row.starts for row in rows]))


def _stack(tensors: Sequence[Tensor], width: int) -> Tensor:
    return torch.cat([F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, width - tensor.shape[1])) for tensor in tensors])
