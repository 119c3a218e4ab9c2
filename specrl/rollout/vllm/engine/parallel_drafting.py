"""Drafts of all positions in one pass (P-EAGLE): what vLLM's proposer lacks for draft lengths and weights that change.

vLLM appends a masked slot for each position after the first to what the drafter reads of a request. How many these are
is fixed at the engine's start, and so is the hidden state in them, which `fc` makes of the drafter's `mask_hidden`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from specrl.models.drafters import MASK_HIDDEN
from specrl.rollout.vllm.weights.load import Weights


class ParallelDrafting:
    """Takes the place of the proposer's `propose`, and keeps the masked slots' hidden state that of the weights."""

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer
        self._propose = proposer.propose
        self._mask: Tensor | None = None
        """What came last as `mask_hidden`."""

    @classmethod
    def install(cls, runner: Any) -> ParallelDrafting | None:
        """Take the place of the method of a runner's proposer; return None unless its drafter is a parallel one."""
        proposer = getattr(runner, "drafter", None)
        if not getattr(proposer, "parallel_drafting", False):
            return None
        parallel = cls(proposer)
        runner.drafter.propose = parallel.propose
        return parallel

    def propose(self, num_speculative_tokens: int, **arguments: Any) -> Tensor:
        """Return drafts of this length, int64 [requests, num_speculative_tokens]; arguments are those of vLLM's.

        With one token or none there is no masked slot, and the drafter only reads.
        """
        slots = max(1, num_speculative_tokens)
        self._proposer.extra_slots_per_request = slots
        self._proposer.net_num_new_slots_per_request = slots - 1
        self._proposer.needs_extra_input_slots = slots > 1
        drafts: Tensor = self._propose(num_speculative_tokens, **arguments)
        return drafts

    def noted(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yield the drafter's tensors as they come, and keep its `mask_hidden` for `refresh`."""
        for name, tensor in weights:
            if name == MASK_HIDDEN:
                self._mask = tensor.clone()
            yield name, tensor

    @torch.inference_mode()
    def refresh(self) -> None:
        """Compute the masked slots' hidden state anew, after the drafter was loaded from `noted`.

        `mask_hidden` is a buffer without a loader, which vLLM's own reload (that of GPUs) writes into the memory of a
        module that it throws away.
        """
        drafter = self._proposer.model
        if self._mask is not None:
            drafter.mask_hidden.copy_(self._mask.view(1, -1))
        hidden = drafter.combine_hidden_states(drafter.mask_hidden.view(-1))
        self._proposer.parallel_drafting_hidden_state_tensor.copy_(hidden)
