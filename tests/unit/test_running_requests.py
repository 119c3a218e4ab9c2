"""What vLLM returns of a running request, taken in."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from specrl.rollout.errors import NonFiniteLogitsError
from specrl.rollout.vllm.engine.running import RunningRequest


def output(logprobs: list[float], prompt: list[float] | None = None) -> SimpleNamespace:
    """vLLM's output of an iteration with these log-probs of tokens, or those of a prompt."""
    columns = np.array([[logprob, 0.0, 0.0] for logprob in logprobs])
    scored = None if prompt is None else SimpleNamespace(logprobs=np.array(prompt)[:, None])
    return SimpleNamespace(
        new_token_ids=list(range(len(logprobs))),
        new_logprobs=SimpleNamespace(logprobs=columns) if logprobs else None,
        new_prompt_logprobs_tensors=scored,
        routed_experts=None,
        finish_reason=None,
    )


def test_the_token_whose_logits_are_not_finite_is_named_behind_accepted_drafts_and_in_a_scored_prompt() -> None:
    request = RunningRequest(5, name="a")
    request.take(output([-0.5, -0.25]))
    with pytest.raises(NonFiniteLogitsError, match="logits for token 9 of request a"):
        request.take(output([-0.5, -1.0, float("nan")]))
    with pytest.raises(NonFiniteLogitsError, match="logits for token 2 of request b"):
        RunningRequest(4, name="b").take(output([], [-1.0, float("nan"), -2.0]))
