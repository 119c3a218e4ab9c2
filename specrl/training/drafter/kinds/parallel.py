"""The EAGLE-3 drafter that drafts all positions in one forward pass (P-EAGLE, arXiv:2602.01469).

The first position is EAGLE-3's. Each later one would need the draft before it and the module's output there. In their
place it reads a mask, which is the same at all of them: the embedding of a token that stands for none, and hidden
states that are learned. What it sees besides is what any chain sees (`drafter/ttt.py`): the slots with the policy's
features up to the chain's start, and the masked slots since then, at consecutive positions. So no pass waits for
another one.

It is trained by the unroll of `drafter/ttt.py` with the same targets. A later position cannot know the tokens drafted
before it, and so learns the policy's distribution averaged over them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specrl.training.drafter.kinds.eagle3 import Eagle3, Eagle3Shape


class ParallelEagle3(Eagle3):
    """The drafter, with the names that vLLM has for its tensors."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape)
        assert shape.mask_token is not None
        self.mask_token = shape.mask_token
        # As large as a feature is after a norm, so that the norms behind `fc` do not blow its gradient up.
        self.mask_hidden = nn.Parameter(torch.randn(1, len(shape.feature_layers) * shape.hidden_size))

    def advance(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        token = torch.tensor([self.mask_token], device=hidden.device)
        mask = self.embed(token, torch.zeros_like(token)), self.feed(self.mask_hidden)
        return mask[0].expand_as(embedded), mask[1].expand_as(hidden)


def eagle3_module(shape: Eagle3Shape) -> Eagle3:
    """Return a new drafter of the kind that its shape says."""
    return Eagle3(shape) if shape.mask_token is None else ParallelEagle3(shape)
