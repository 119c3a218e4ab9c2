"""Same seeds, same tokens: no draft source, k, batch size, chunk, cached prefix or preemption changes one (FP32)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from specrl.rollout.drafts.acceptance import DRAFTER, RECENT, REPLAY
from specrl.rollout.engine import Engine, Request, Response, StoredText
from tests.exactness.conftest import Start
from tests.exactness.engines import in_batches, mixed_requests, running
from tests.exactness.toy import drafter_weights, likely_tokens, policy_weights, toy_config

pytestmark = pytest.mark.engine
REQUESTS = mixed_requests(224, longest_prompt=70, max_tokens=112)
NUM_TOKENS = 100_000
"""At least this many are compared by `test_every_source_and_k_gives_the_tokens_of_plain_decoding` in all."""
BATCH = 32
ADAPTIVE = "adaptive"
CASES: list[tuple[str, int | str]] = [
    *[("eagle3", k) for k in (0, 1, 3, 5, ADAPTIVE)],
    *[("eagle3+replay", k) for k in (3, ADAPTIVE)],
    *[("replay", k) for k in (1, 5)],
    ("ngram", 4),
    ("draft_model", 2),
]
LOGPROB_NOISE = 1e-4
"""Nats between batch shapes in FP32."""


@pytest.fixture(scope="module")
def plain(engine_of: Start) -> list[Response]:
    """An engine that cannot speculate, `BATCH` at once: what everything else is compared with."""
    return in_batches(engine_of("none"), REQUESTS, BATCH)


@pytest.fixture(scope="module")
def texts(plain: list[Response]) -> list[StoredText]:
    """Responses to two of three prompts, half of them wrong in one token."""
    stored = []
    for index, (request, response) in enumerate(zip(REQUESTS, plain, strict=True)):
        wrong = [*response.tokens[:5], likely_tokens()[-1], *response.tokens[6:]]
        if index % 3:
            stored.append(StoredText(request.prompt_tokens, wrong if index % 2 else response.tokens))
    return stored


def assert_same(responses: list[Response], expected: list[Response]) -> None:
    """The same tokens for the requests answered, and log-probs equal up to the noise of batch shapes."""
    assert responses
    for response, wanted in zip(responses, expected, strict=False):
        assert response.tokens == wanted.tokens
        assert response.finish_reason == wanted.finish_reason
        assert response.logprobs == pytest.approx(wanted.logprobs, abs=LOGPROB_NOISE)


@pytest.mark.parametrize(("method", "k"), CASES)
def test_every_source_and_k_gives_the_tokens_of_plain_decoding(
    engine_of: Start, plain: list[Response], texts: list[StoredText], method: str, k: int | str
) -> None:
    engine = engine_of(method)
    if engine.replays:
        engine.set_replay(texts)
    engine.set_k(k if isinstance(k, int) else None)
    engine.reset_prefix_cache()
    parts = [REQUESTS[start : start + BATCH] for start in range(0, len(REQUESTS), BATCH)]
    generations = [engine.generate(part, recall=True) for part in parts]
    assert_same([response for generation in generations for response in generation.responses], plain)
    counts = [generation.stats.by_source for generation in generations]
    accepted = {
        source: sum(by_source[source].num_accepted_tokens for by_source in counts if source in by_source)
        for source in (DRAFTER, REPLAY, RECENT)
    }
    if k != ADAPTIVE:
        assert (accepted[DRAFTER] > 100) == (k != 0 and method != "replay")
        assert (accepted[REPLAY] > 100) == ("replay" in method)
        assert (accepted[RECENT] > 100) == ("replay" in method)


def test_enough_tokens_are_compared(plain: list[Response]) -> None:
    assert len(CASES) * sum(len(response.tokens) for response in plain) >= NUM_TOKENS
    assert {request.temperature for request in REQUESTS[:BATCH]} == {0.0, 0.6, 1.0, 1.3}


@pytest.mark.parametrize(("method", "size"), [("none", 1), ("none", 5), ("eagle3", 1), ("eagle3", 2), ("eagle3", 8)])
def test_the_batch_size_changes_no_token(engine_of: Start, plain: list[Response], method: str, size: int) -> None:
    engine = engine_of(method)
    engine.reset_prefix_cache()
    assert_same(in_batches(engine, REQUESTS[: 4 * size], size), plain)


@pytest.mark.parametrize(("method", "k"), [("none", 0), ("eagle3", 5), ("eagle3+replay", 3), ("ngram", 4)])
def test_stop_strings_hold_inside_accepted_drafts(
    engine_of: Start, plain: list[Response], texts: list[StoredText], method: str, k: int
) -> None:
    """Fails where a string is looked for at the end of what came at once, or what follows it is kept."""
    engine, strings = engine_of(method), ("aa", "cea", "g", "zzz")
    if engine.replays:
        engine.set_replay(texts)
    engine.set_k(k)
    generation = engine.generate([replace(request, stop=strings) for request in REQUESTS], recall=True)
    ends = [ended_at([engine.tokenizer.decode([token]) for token in response.tokens], strings) for response in plain]
    lengths = [min(len(response.tokens), end) for response, end in zip(plain, ends, strict=True)]
    assert sum(length < len(response.tokens) for response, length in zip(plain, lengths, strict=True)) > 100
    for response, whole, end, length in zip(generation.responses, plain, ends, lengths, strict=True):
        assert response.tokens == whole.tokens[:length]
        assert response.logprobs == pytest.approx(whole.logprobs[:length], abs=LOGPROB_NOISE)
        assert response.text == engine.tokenizer.decode(whole.tokens[:length], skip_special_tokens=True)
        assert response.finish_reason == ("stop" if end <= len(whole.tokens) else whole.finish_reason)
        assert sum(draft.accepted for draft in response.drafts) <= len(response.tokens)
    if k:
        assert generation.stats.num_accepted_tokens > 20
    assert_same(engine.generate(REQUESTS[:64]).responses, plain)


def ended_at(characters: list[str], strings: Sequence[str]) -> int:
    """The number of tokens with which the first string is there; every token here is a character or special."""
    texts = accumulate(characters)
    return next((size for size, text in enumerate(texts, 1) if any(string in text for string in strings)), 10**6)


def test_k_may_change_while_generating(engine_of: Start, plain: list[Response]) -> None:
    engine, generator = engine_of("eagle3"), random.Random(3)
    generation = engine.generate(REQUESTS[:64], on_progress=lambda *_: engine.set_k(generator.randint(0, 5)))
    assert_same(generation.responses, plain)


def test_synchronous_scheduling_and_a_schedule_change_no_token(
    directories: tuple[Path, Path], plain: list[Response]
) -> None:
    config = toy_config("eagle3", 3, max_num_seqs=32)
    with running(*directories, config, async_scheduling=False) as engine:
        assert engine.llm.engine_core.engine_core.batch_queue is None
        assert_same(engine.generate(REQUESTS[:48]).responses, plain)
        engine.draft_up_to([0] + [3] * 2 + [2] * 6 + [1] * 8 + [0] * 16)
        assert_same(engine.generate(REQUESTS[:48]).responses, plain)
    with running(*directories, config) as engine:
        assert engine.llm.engine_core.engine_core.batch_queue is not None
        engine.draft_up_to([0] + [3] * 2 + [2] * 6 + [1] * 8 + [0] * 16)
        assert_same(engine.generate(REQUESTS[:48]).responses, plain)


def test_cached_prefixes_and_the_order_of_requests_change_no_token(engine_of: Start, plain: list[Response]) -> None:
    order = random.Random(4).sample(range(len(REQUESTS)), 64)
    generation = engine_of("eagle3").generate([REQUESTS[index] for index in order])
    assert_same(generation.responses, [plain[index] for index in order])


def test_prompts_that_begin_alike_share_blocks(engine_of: Start) -> None:
    engine = engine_of("none")
    scheduler = engine.llm.engine_core.engine_core.scheduler
    first, *others = likely_tokens()
    prompts = [[first] * 64 + [other] * 5 for other in others[:4]]
    counted: list[int] = []
    schedule = scheduler.schedule
    scheduler.schedule = lambda *args: counted_rows(schedule(*args), counted)
    engine.reset_prefix_cache()
    engine.generate([replace(REQUESTS[0], prompt_tokens=prompt, max_tokens=1) for prompt in prompts])
    scheduler.schedule = schedule
    assert sum(counted) == 64 + 4 * 5


def counted_rows(scheduled: Any, counted: list[int]) -> Any:
    counted.append(scheduled.total_num_scheduled_tokens)
    return scheduled


def test_a_rounded_drafter_changes_no_token(engine_of: Start, plain: list[Response]) -> None:
    """Drafter weights rounded to two binary digits: other drafts, the same responses."""
    engine = engine_of("eagle3")
    whole = engine.generate(REQUESTS[:64])
    engine.refit_drafter(
        (name, two_digits(tensor) if tensor.is_floating_point() else tensor)
        for name, tensor in drafter_weights(1).items()
    )
    generation = engine.generate(REQUESTS[:64])
    engine.refit_drafter(drafter_weights(1).items())
    assert generation.stats != whole.stats
    assert_same(generation.responses, plain)


def test_speculation_works_up_to_the_end_of_the_context(engine_of: Start) -> None:
    engine = engine_of("eagle3")
    limit = engine.max_length
    requests = [
        replace(request, prompt_tokens=(request.prompt_tokens * limit)[: limit - room], max_tokens=10**6)
        for room, request in enumerate(REQUESTS[:12], start=1)
    ]
    engine.set_k(0)
    plainly = engine.generate(requests).responses
    engine.set_k(5)
    assert_same(engine.generate(requests).responses, plainly)
    for room, response in enumerate(plainly, start=1):
        assert len(response.tokens) == room or response.finish_reason == "stop"


def test_preemption_chunked_prefill_and_no_prefix_cache_change_no_token(
    directories: tuple[Path, Path], plain: list[Response], texts: list[StoredText]
) -> None:
    tight = {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 200,
        "block_size": 32,
        "kv_cache_memory_bytes": 3 * 2**20,
    }
    with running(*directories, toy_config("eagle3+replay", 3), **tight) as engine:
        engine.set_replay(texts)
        counted = count_preemptions(engine)
        assert_same(engine.generate(REQUESTS[:48]).responses, plain)
        assert len(counted) > 5


def test_three_refits_to_other_weights_change_nothing_about_it(engine_of: Start) -> None:
    """Policy and drafter; the tokens of a refitted engine are those it gives without speculation."""
    engine = engine_of("eagle3")
    before: list[list[int]] = []
    for version in (1, 2, 3):
        engine.refit(policy_weights(version).items(), drafter_weights(10 + version).items())
        engine.set_k(0)
        plainly = engine.generate(REQUESTS[:64]).responses
        engine.set_k(3)
        assert_same(engine.generate(REQUESTS[:64]).responses, plainly)
        assert [response.tokens for response in plainly] != before
        before = [response.tokens for response in plainly]
    engine.refit(policy_weights(0).items(), drafter_weights(1).items())


def test_the_warm_up_of_gpus_runs_with_the_replaced_parts(
    engine_of: Start, plain: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for every feature of vLLM's sampler; those whose kernels CPUs lack are left out here."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    asked = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, logprobs=5, prompt_logprobs=1)
    monkeypatch.setattr(SamplingParams, "for_sampler_warmup", lambda: asked)
    engine = engine_of("eagle3+replay")
    engine.reset_prefix_cache()
    worker = engine.llm.model_executor.driver_worker.worker
    warmup_kernels(worker.model_runner, worker.execute_model, lambda grammar: worker.sample_tokens(None))
    engine.reset_prefix_cache()
    assert_same(engine.generate(REQUESTS[:16]).responses, plain)


def two_digits(tensor: Tensor) -> Tensor:
    mantissa, exponent = tensor.frexp()
    return mantissa.mul(4).round().div(4).ldexp(exponent)


def count_preemptions(engine: Engine) -> list[str]:
    scheduler = engine.llm.engine_core.engine_core.scheduler
    preempt, counted = scheduler._preempt_request, []

    def preempt_and_count(request: Request, *args: object, **kwargs: object) -> object:
        counted.append(request)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = preempt_and_count
    return counted
