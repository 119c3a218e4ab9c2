"""How a model-based drafter picks its tokens: the likeliest, or drawn with the policy's own random number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.sampling.inverse_cdf import most_likely, pick
from specrl.rollout.vllm.sampler import RequestRecord


class DraftHead:
    """Takes the place of the proposer's `_greedy_sample`, which every pass of the drafter ends with.

    Coupled, a draft is drawn by inverse CDF with the very random number that the policy's token will be drawn with, at
    the request's temperature, top-k and top-p. The two tokens are the same with a chance of up to sum(min(p, q)), where
    the likeliest token is right with chance p(likeliest): better for a drafter that knows how the policy wavers, worse
    for one that is unsure where the policy is not. Such drafts depend on u, which would bias rejection sampling; here
    the policy's token is picked without regard to drafts.

    Over a draft vocabulary of its own it works there: vLLM writes the draft logits into a row over the policy's whole
    vocabulary first, in every pass; with 2,048 of 49,152 tokens that costs more than the drafter's head. Ties go to the
    lowest id in both.
    """

    def __init__(self, proposer: Any, coupled: bool) -> None:
        self.model: Any = proposer.model
        self.coupled = coupled
        self.records: Sequence[RequestRecord] = ()
        self.passes = 0

    def begin(self, records: Sequence[RequestRecord]) -> None:
        """The drafter is about to propose for these requests, in this order."""
        self.records, self.passes = records, 0

    def __call__(self, hidden: Tensor) -> Tensor:
        """Target ids int64 [n] for outputs [n, hidden] of the drafter."""
        model = self.model
        # Of target ids from draft ids; both ascend, so that the two CDFs run through the vocabulary alike.
        offsets: Tensor | None = getattr(model, "draft_id_to_target_id", None)
        own_vocabulary = offsets is not None
        logits = model.logits_processor(model.lm_head, hidden) if own_vocabulary else model.compute_logits(hidden)
        drafted: Tensor = self._draw(logits) if self.coupled else most_likely(logits)
        self.passes += 1
        return drafted if offsets is None else drafted + offsets[drafted]

    def _draw(self, logits: Tensor) -> Tensor:
        """Draft ids int64 [n] for logits [n, draft vocabulary]."""
        records = self.records
        assert len(records) == logits.shape[0], (len(records), logits.shape)
        u = np.array([record.uniforms[len(record.logprobs) + self.passes] for record in records])
        temperature = torch.tensor([record.temperature for record in records])
        top_k = torch.tensor([record.top_k for record in records])
        top_p = torch.tensor([record.top_p for record in records])
        return pick(logits, temperature, top_k, top_p, torch.from_numpy(u).to(logits.device))[0]


def install_draft_head(runner: Any, coupled: bool) -> DraftHead | None:
    """Put a `DraftHead` into the runner's drafter, if it has one with weights."""
    proposer: Any = getattr(runner, "drafter", None)
    if getattr(proposer, "model", None) is None:
        return None
    assert hasattr(proposer, "_greedy_sample"), type(proposer)
    head = DraftHead(proposer, coupled)
    proposer._greedy_sample = head
    return head
