"""Prompts that requests have in common are read once, and no token is another one for it (FP32)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specrl.rollout.engine import Engine, Request, Response, response_seed
from tests.exactness.conftest import Start
from tests.exactness.test_token_for_token import assert_same
from tests.exactness.toy import likely_tokens

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU blocks are small, and vLLM shares whole ones"),
]
LENGTHS = (1, 2, 13, 33, 77, 96)
"""The lengths of the prompts: a block has 32 tokens."""
SAMPLES = 4


def groups(seed: int = 0) -> list[Request]:
    generator, requests = random.Random(seed), list[Request]()
    for prompt_id, length in enumerate(LENGTHS):
        prompt = generator.choices(likely_tokens(), k=length)
        requests += [Request(prompt, response_seed(seed, 0, prompt_id, n), 12 + 5 * n, 1.0) for n in range(SAMPLES)]
    return requests


def one_by_one(engine: Engine, requests: list[Request]) -> list[Response]:
    responses = []
    for request in requests:
        engine.reset_prefix_cache()
        responses += engine.generate([request]).responses
    return responses


@pytest.mark.parametrize("method", ["none", "eagle3", "eagle3+replay"])
def test_a_group_reads_its_prompt_once(engine_of: Start, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    engine, requests, rows = engine_of(method), groups(), list[int]()
    expected = one_by_one(engine, requests)
    forward = engine._runner._model_forward

    def counted(**inputs: Any) -> Any:
        rows.append(inputs["positions"].shape[-1])
        return forward(**inputs)

    monkeypatch.setattr(engine._runner, "_model_forward", counted)
    engine.set_k(0)
    engine.reset_prefix_cache()
    assert_same(engine.generate(requests).responses, expected)
    num_decoded = sum(len(response.tokens) for response in expected)
    # Each token but a response's last is computed once, and so is the last of a prompt for each response.
    assert sum(rows) == num_decoded + sum(length - 1 for length in LENGTHS)
    engine.set_k(engine.longest_k)
    for _ in range(2):  # the second time whole blocks are in the cache
        generation = engine.generate(requests)
        assert_same(generation.responses, expected)
    assert method == "none" or generation.stats.num_accepted_tokens


def test_a_drafter_that_shares_a_prompt_drafts_as_if_it_had_read_it(engine_of: Start) -> None:
    """Its keys and values come along."""
    engine, requests = engine_of("eagle3"), [request for request in groups() if len(request.prompt_tokens) > 1]
    alone = [request for n in range(SAMPLES) for request in requests[n::SAMPLES]]
    counts = [0, 0]
    for place in range(2):
        engine.reset_prefix_cache()
        parts = [requests] if place else [[request] for request in alone]
        for part in parts:
            if not place:
                engine.reset_prefix_cache()
            counts[place] += engine.generate(part).stats.num_accepted_tokens
    assert counts[0] == counts[1] > 0


def test_requests_that_wait_for_a_prompt_may_be_given_up(engine_of: Start) -> None:
    engine, requests = engine_of("none"), groups()
    engine.reset_prefix_cache()
    responses = engine.generate(requests, stop=lambda: True).responses
    assert [response.finish_reason for response in responses] == ["abort"] * len(requests)
    assert all(len(response.tokens) <= 1 for response in responses)
    assert_same(engine.generate(requests).responses, one_by_one(engine, requests))


def test_more_requests_than_can_run_share_what_is_being_read(engine_of: Start) -> None:
    engine = engine_of("none")
    requests = [request for seed in range(11) for request in groups(seed)]
    assert len(requests) > engine.config.engine.max_num_seqs
    engine.reset_prefix_cache()
    few = random.Random(0).sample(range(len(requests)), 16)
    responses = engine.generate(requests).responses
    assert_same([responses[index] for index in few], one_by_one(engine, [requests[index] for index in few]))
