"""Prompts of the task, sent to a server as its clients would send them, and what it accepts of its drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from specrl.config import Config
from specrl.data.problems import Prompt
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.vllm.serving.server import ModelServer, ServerEndedError

AT_ONCE = 4
"""The number of requests that are under way at the same time."""
COUNT_SECONDS = 10
"""How long the server may take to count a response after it has sent it."""


@dataclass(frozen=True)
class Check:
    """What came of the requests."""

    responses: list[str]
    tokens: int
    """The number of tokens of all responses together."""
    stats: SpeculationStats
    """The drafts of these responses, as the server counted them."""


def send(server: ModelServer, prompts: Sequence[Prompt], config: Config) -> Check:
    """Ask for a response to each prompt, sampled as `sampling` says.

    Raises:
        ServerEndedError: The server refuses a request, has ended, or has drafted nothing.
    """
    before, earlier = server.counters()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda prompt: server.complete(body_of(prompt, config)), prompts))
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    deadline = time.monotonic() + COUNT_SECONDS
    counted, later = server.counters()
    while counted - before < tokens and time.monotonic() < deadline:
        time.sleep(0.1)
        counted, later = server.counters()
    stats = difference(later, earlier)
    if not stats.num_drafts:
        raise ServerEndedError(f"vLLM's server drafted nothing in {tokens} tokens: it does not speculate")
    return Check([answer["choices"][0]["text"] for answer in answers], tokens, stats)


def body_of(prompt: Prompt, config: Config) -> dict[str, Any]:
    """A request to complete a prompt, as OpenAI's API and vLLM's additions to it have it.

    It has no seed: on CPUs, vLLM cannot rewind a request's own random numbers.
    """
    sampling = config.sampling
    return {
        "prompt": prompt.tokens,
        "max_tokens": min(sampling.max_response_tokens, config.model.max_length - len(prompt.tokens)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,  # for vLLM, too, 0 stands for all tokens
        "stop": list(sampling.stop),
    }


def difference(later: SpeculationStats, earlier: SpeculationStats) -> SpeculationStats:
    """The counters of what happened between two moments."""
    drafts = later.num_drafts - earlier.num_drafts
    per_pos = tuple(a - b for a, b in zip(later.accepted_per_pos, earlier.accepted_per_pos, strict=True))
    return SpeculationStats(
        num_drafts=drafts,
        num_draft_tokens=later.num_draft_tokens - earlier.num_draft_tokens,
        num_accepted_tokens=later.num_accepted_tokens - earlier.num_accepted_tokens,
        accepted_per_pos=per_pos,
        drafted_per_pos=(drafts,) * len(per_pos),
    )
