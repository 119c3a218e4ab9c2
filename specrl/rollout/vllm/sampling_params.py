"""What vLLM is asked for: a response to sample, or a sequence to score. The seed travels to the project's sampler."""

from __future__ import annotations

from typing import Any

from specrl.rollout.requests import Request
from specrl.rollout.vllm.sampler import seed_argument


def generation_params(request: Request, max_length: int, stop_tokens: list[int]) -> Any:
    """vLLM's `SamplingParams` of a request.

    Raises:
        ValueError: its prompt leaves no room for a token within `max_length`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    room = max_length - len(request.prompt_tokens)
    if room < 1:
        raise ValueError(
            f"a prompt of {len(request.prompt_tokens)} tokens leaves no room for a response within "
            f"model.max_length = {max_length}; raise it or leave the prompt out"
        )
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        **seed_argument(request.seed),
        max_tokens=min(request.max_tokens, room),
        stop_token_ids=stop_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_params() -> Any:
    """vLLM's `SamplingParams` for the log-probs of a sequence given as a prompt; its one new token is thrown away."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **seed_argument(0),
    )
