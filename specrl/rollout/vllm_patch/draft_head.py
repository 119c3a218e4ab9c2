"""A greedy draft token picked among the draft vocabulary, not among the policy's."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def narrow_draft_head(runner: Any) -> None:
    """Let an EAGLE-3 drafter with a draft vocabulary of its own take the argmax there.

    vLLM writes the draft logits into a row over the policy's whole vocabulary first, in every pass: with 2,048 of
    49,152 tokens that costs more than the drafter's head. The token is the same; ties go to the lowest id in both.
    """
    proposer: Any = getattr(runner, "drafter", None)
    model: Any = getattr(proposer, "model", None)
    if getattr(model, "draft_id_to_target_id", None) is None:
        return
    assert hasattr(proposer, "_greedy_sample"), type(proposer)

    def greedy(hidden: Tensor) -> Tensor:
        """Target ids int64 [n] for outputs [n, hidden] of the drafter."""
        drafted: Tensor = model.logits_processor(model.lm_head, hidden).argmax(-1)
        offsets: Tensor = model.draft_id_to_target_id
        return drafted + offsets[drafted]

    proposer._greedy_sample = greedy
