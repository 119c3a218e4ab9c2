"""Same seeds, same tokens: no draft source, k, batch size, chunk, cached prefix or preemption changes one (FP32)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specrl.rollout.engine import Engine, Request, Response
from tests.exactness.engines import in_batches, mixed_requests, running
from tests.exactness.toy import drafter_weights, policy_weights, toy_config, write_drafter, write_policy

pytestmark = pytest.mark.engine
BATCH_SIZES = (1, 3, 8, 32)
REQUESTS = mixed_requests(98)
LOGPROB_NOISE = 1e-4
"""Nats between batch shapes in FP32."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("exactness")
    return write_policy(root / "policy", policy_weights(0)), write_drafter(root / "drafter", drafter_weights(1))


@pytest.fixture(scope="module")
def plain(directories: tuple[Path, Path]) -> list[Response]:
    """Plain decoding, 32 at once: what everything else is compared with."""
    with running(directories[0], None, toy_config()) as engine:
        responses = in_batches(engine, REQUESTS, 32)
        for size in BATCH_SIZES[:-1]:
            assert_same(in_batches(engine, REQUESTS[: 5 * size], size), responses)
    return responses


@pytest.fixture(scope="module")
def eagle(directories: tuple[Path, Path]) -> Iterator[Engine]:
    with running(*directories, toy_config("eagle3", 5)) as engine:
        yield engine


def assert_same(responses: list[Response], expected: list[Response]) -> None:
    """The same tokens for the requests answered, and log-probs equal up to the noise of batch shapes."""
    for response, wanted in zip(responses, expected, strict=False):
        assert response.tokens == wanted.tokens
        assert response.finish_reason == wanted.finish_reason
        assert response.logprobs == pytest.approx(wanted.logprobs, abs=LOGPROB_NOISE)


@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_eagle3_gives_the_tokens_of_plain_decoding(eagle: Engine, plain: list[Response], k: int) -> None:
    eagle.set_k(k)
    generation = eagle.generate(REQUESTS)
    assert_same(generation.responses, plain)
    assert (generation.stats.num_accepted_tokens > 100) == (k > 0)
    assert len(generation.stats.accepted_per_pos) == k


@pytest.mark.parametrize("size", BATCH_SIZES)
def test_batch_size_changes_no_token_under_speculation(eagle: Engine, plain: list[Response], size: int) -> None:
    eagle.set_k(3)
    assert_same(in_batches(eagle, REQUESTS[: 5 * size], size), plain)


def test_k_may_change_while_generating(eagle: Engine, plain: list[Response]) -> None:
    generator = random.Random(3)
    generation = eagle.generate(REQUESTS, on_progress=lambda *_: eagle.set_k(generator.randint(0, 5)))
    assert_same(generation.responses, plain)


def test_cached_prefixes_and_the_order_of_requests_change_no_token(eagle: Engine, plain: list[Response]) -> None:
    eagle.set_k(3)
    order = random.Random(4).sample(range(len(REQUESTS)), len(REQUESTS))
    generation = eagle.generate([REQUESTS[index] for index in order])
    assert_same(generation.responses, [plain[index] for index in order])


def test_speculation_works_up_to_the_end_of_the_context(eagle: Engine) -> None:
    limit = eagle.max_length
    requests = [
        replace(request, prompt_tokens=(request.prompt_tokens * limit)[: limit - room], max_tokens=10**6)
        for room, request in enumerate(REQUESTS[:12], start=1)
    ]
    eagle.set_k(0)
    plainly = eagle.generate(requests).responses
    eagle.set_k(5)
    assert_same(eagle.generate(requests).responses, plainly)
    for room, response in enumerate(plainly, start=1):
        assert len(response.tokens) == room or response.finish_reason == "stop"


def test_ngram_gives_the_tokens_of_plain_decoding(directories: tuple[Path, Path], plain: list[Response]) -> None:
    with running(directories[0], None, toy_config("ngram", 4)) as engine:
        generation = engine.generate(REQUESTS)
        assert_same(generation.responses, plain)
        assert generation.stats.num_accepted_tokens > 100
        assert_same(in_batches(engine, REQUESTS[:28], 4), plain)


def test_preemption_chunked_prefill_and_no_prefix_cache_change_no_token(
    directories: tuple[Path, Path], plain: list[Response]
) -> None:
    tight = {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 200,
        "block_size": 32,
        "kv_cache_memory_bytes": 3 * 2**20,
    }
    with running(*directories, toy_config("eagle3", 3), **tight) as engine:
        counted = count_preemptions(engine)
        assert_same(engine.generate(REQUESTS[:49]).responses, plain)
        assert len(counted) > 5


def count_preemptions(engine: Engine) -> list[str]:
    scheduler = engine._llm.engine_core.engine_core.scheduler
    preempt, counted = scheduler._preempt_request, []

    def preempt_and_count(request: Request, *args: object, **kwargs: object) -> object:
        counted.append(request)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = preempt_and_count
    return counted
