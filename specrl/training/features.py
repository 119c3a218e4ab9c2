"""Features: the detached results of the policy's forward pass from which the drafter learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

NOT_SAMPLED = -1
"""The value of `Features.target_top1` if an environment wrote the next token, which is neither drafted nor learned."""
PARTS = ("tokens", "mask", "hidden", "targets", "target_top1")


@dataclass(frozen=True)
class FeatureSpec:
    layers: tuple[int, ...]
    """Layer indices. Index i means the residual stream that enters layer i, as in vLLM and SGLang; in a policy of n
    layers, index n means the one that leaves the last layer."""
    draft_tokens: Tensor
    """int64 `[draft_vocab]`, sorted, on the policy's device: the target ids of the draft vocabulary. It is empty for a
    drafter that has the policy's head, and so needs no targets."""

    def target_width(self, hidden_size: int) -> int:
        return hidden_size if len(self.draft_tokens) else 0


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
    """`[batch, seq, layers * hidden]` in the policy's compute type: the inputs of the chosen layers, concatenated."""
    targets: Tensor
    """`[batch, seq, hidden]`: the policy's last hidden states, which take far less memory than the logits for the next
    token that `logits` computes from them. 0 where `mask` is False; `[batch, seq, 0]` without a `head`."""
    target_top1: Tensor
    """int64 `[batch, seq]`: the most likely next token of the full vocabulary; 0 where `mask` is False, and NOT_SAMPLED
    where the policy did not sample the next token."""
    head: Tensor | None = None
    """`[draft_vocab, hidden]`: the rows of the policy's head for the draft vocabulary, as of the same forward pass; all
    micro-batches of the pass share them. None for a drafter that has the head itself."""
    starts: Tensor | None = None
    """int64 `[batch]`: the position of each row's first token in its sequence; None if all are 0."""

    def logits(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The policy's logits on the draft vocabulary at the places `rows`, `columns` `[n]`: `[n, draft_vocab]`."""
        assert self.head is not None, "this drafter computes the policy's logits itself"
        return F.linear(self.targets[rows, columns], self.head)

    def choose(self, rows: Sequence[int]) -> Features:
        chosen = list(rows)
        return self._of(lambda tensor: tensor[chosen])

    def row(self, row: int, length: int) -> Features:
        return self._of(lambda tensor: tensor[row : row + 1, :length].clone())

    def _of(self, rows: Callable[[Tensor], Tensor]) -> Features:
        starts = None if self.starts is None else rows(self.starts[:, None])[:, 0]
        return Features(**{part: rows(getattr(self, part)) for part in PARTS}, head=self.head, starts=starts)


def sequences(features: Features) -> list[Features]:
    """The sequences of a micro-batch that have something to draft, one by one and without padding."""
    masks = [(row, mask) for row, mask in enumerate(features.mask) if int(mask.sum()) >= 2]
    return [features.row(row, int(mask.nonzero()[-1]) + 2) for row, mask in masks]


def padded(rows: Sequence[Features]) -> Features:
    """One micro-batch of single sequences, each in its own row, so that none attends to another.

    All must be from the same forward pass.
    """
    width = max(row.tokens.shape[1] for row in rows)
    assert all(row.head is rows[0].head for row in rows), "a micro-batch has one head"
    starts = [torch.zeros(1, dtype=torch.int64) if row.starts is None else row.starts for row in rows]
    stacked = {part: _stack([getattr(row, part) for row in rows], width) for part in PARTS}
    where = torch.cat([start.to(rows[0].tokens.device) for start in starts])
    return Features(**stacked, head=rows[0].head, starts=where)


def _stack(tensors: Sequence[Tensor], width: int) -> Tensor:
    return torch.cat([F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, width - tensor.shape[1])) for tensor in tensors])
