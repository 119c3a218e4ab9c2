"""Verification of drafts: a draft token is accepted if it equals the picked token, up to the response's end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specrl.rollout.sampling.gumbel import Picked


class Verified(NamedTuple):
    """The tokens that each request of a batch gets."""

    tokens: Tensor
    """[requests, width] int64, -1 beyond a request's tokens."""
    counts: Tensor
    """[requests] int32, at least 1: the accepted draft tokens and one more, up to a stop token and the limit."""


class Sampling(NamedTuple):
    """Functions that pick tokens, see `gumbel.pick`, and verify drafts; results are the same on all devices."""

    pick: Callable[..., Picked]
    verify: Callable[..., Verified]


def verify(picked: Tensor, drafts: Tensor, starts: Tensor, stop_tokens: Tensor, limits: Tensor, width: int) -> Verified:
    """Verify the drafts of a batch; all tensors are on one device.

    A request has one row of logits for the token after each token of its draft, and one for the token before them.

    Args:
        picked: [rows] int64, the picked tokens.
        drafts: [rows], the token read at each row: the draft's token, or any at a request's first row.
        starts: [requests + 1], the first row of each request.
        stop_tokens: [any number] int64.
        limits: [requests], at least 1: the number of tokens that a request may still get.
        width: The largest number of rows of a request.
    """
    column = torch.arange(width, device=picked.device)
    counts = starts.diff()[:, None]
    rows = (starts[:-1, None] + column).clamp(max=max(len(picked) - 1, 0))
    tokens = picked[rows]
    agrees = (column + 1 < counts) & (drafts[(rows + 1).clamp(max=max(len(picked) - 1, 0))] == tokens)
    goes_on = agrees & ~(tokens[:, :, None] == stop_tokens).any(-1)
    found = torch.minimum(1 + goes_on.long().cumprod(-1).sum(-1), limits)
    return Verified(torch.where(column < found[:, None], tokens, -1), found.int())
