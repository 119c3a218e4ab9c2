"""Text of a request's own seed is read ahead of decoding: the same responses, from fewer iterations (FP32)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specrl.rollout import own_text
from specrl.rollout.drafts.acceptance import OWN_TEXT
from specrl.rollout.engine import Engine, Request, Response, StoredText
from tests.exactness.conftest import Start
from tests.exactness.engines import mixed_requests, running
from tests.exactness.toy import toy_config

pytestmark = pytest.mark.engine
REQUESTS = mixed_requests(64, longest_prompt=70, max_tokens=90)
TOLERANCE = 1e-4  # nats: a pass over many tokens and one over a few add up in another order


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_text, "FIRST", 4)


@pytest.fixture(scope="module")
def plain(engine_of: Start) -> list[Response]:
    return engine_of("none").generate(REQUESTS).responses


@pytest.fixture(params=["replay", "eagle3+replay", "replay, prompts in pieces", "replay, no cached prefixes"])
def engine(request: pytest.FixtureRequest, engine_of: Start, directories: tuple[Path, Path]) -> Iterator[Engine]:
    method, _, how = request.param.partition(", ")
    overrides: dict[str, dict[str, Any]] = {
        "prompts in pieces": {"max_num_batched_tokens": 64},
        "no cached prefixes": {"enable_prefix_caching": False},
    }
    if not how:
        yield engine_of(method)
        return
    with running(*directories, toy_config(method, 3), **overrides[how]) as engine:
        yield engine


def store(engine: Engine, requests: Sequence[Request], texts: Sequence[list[int]]) -> None:
    pairs = zip(requests, texts, strict=True)
    engine.set_replay([StoredText(request.prompt_tokens, text, request.seed) for request, text in pairs])


def altered(index: int, tokens: list[int]) -> list[int]:
    """The text, or one that differs at a third of its length, that goes on where it ended, or that stops early."""
    place = len(tokens) // 3
    return [
        tokens,
        [*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]],
        [*tokens, *tokens],
        tokens[: 2 * place],
    ][index % 4]


def check(responses: Sequence[Response], plain: Sequence[Response]) -> None:
    for found, wanted in zip(responses, plain, strict=True):
        assert (found.tokens, found.text, found.finish_reason) == (wanted.tokens, wanted.text, wanted.finish_reason)
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE)
        assert (found.log_kept_mass is None) == (wanted.log_kept_mass is None)
        assert found.log_kept_mass is None or found.log_kept_mass == pytest.approx(wanted.log_kept_mass, abs=TOLERANCE)
        contexts = [draft.context for draft in found.drafts]
        assert contexts == sorted(contexts) and found.started_at <= found.finished_at


def test_text_of_the_own_seed_is_verified_as_a_prompt_is_read(engine: Engine, plain: list[Response]) -> None:
    store(engine, REQUESTS, [altered(index, response.tokens) for index, response in enumerate(plain)])
    found = engine.generate(REQUESTS)
    check(found.responses, plain)
    own = found.stats.by_source[OWN_TEXT]
    assert 0.5 * found.num_tokens < own.num_accepted_tokens < own.num_draft_tokens
    assert max(draft.drafted for response in found.responses for draft in response.drafts) >= 16
    store(engine, REQUESTS, [response.tokens for response in plain])
    same = engine.generate(REQUESTS)
    check(same.responses, plain)
    assert same.stats.by_source.keys() == {OWN_TEXT}, "something was decoded"
    assert engine.drafting is not None
    assert not engine.drafting._text.drafts.counts().offered.sum(), "reading counts as a lack of drafts"
    if engine.config.engine.max_num_seqs >= 64:  # all at once, and not in pieces
        assert same.stats.decode_steps < 30


def test_responses_that_begin_alike_are_compared_each_with_its_own_seed(engine_of: Start) -> None:
    engine, prompt = engine_of("replay"), REQUESTS[1].prompt_tokens
    requests = [Request(prompt, seed, 80, 0.05) for seed in range(12)]  # nearly greedy
    engine.set_k(0)
    plain = engine.generate(requests).responses
    engine.set_k(engine.longest_k)
    texts = [response.tokens for response in plain]
    assert len({tuple(text[:40]) for text in texts}) < len(texts), "none share a block behind the prompt"
    store(engine, requests, texts)
    check(engine.generate(requests).responses, plain)
    store(engine, requests, texts[1:] + texts[:1])
    check(engine.generate(requests).responses, plain)


def test_a_response_ends_with_a_stop_string_within_its_own_text(engine_of: Start, plain: list[Response]) -> None:
    engine = engine_of("replay")
    words = [response.text[len(response.text) // 2 :][:2] for response in plain]
    requests = [replace(asked, stop=(word,)) for asked, word in zip(REQUESTS, words, strict=True) if word.strip()]
    engine.set_k(0)
    wanted = engine.generate(requests).responses
    engine.set_k(engine.longest_k)
    store(engine, requests, [response.tokens for response, word in zip(plain, words, strict=True) if word.strip()])
    check(engine.generate(requests).responses, wanted)
    assert any(response.finish_reason == "stop" for response in wanted)


def test_nothing_is_read_ahead_where_nothing_may_be_drafted(engine_of: Start, plain: list[Response]) -> None:
    engine = engine_of("replay")
    store(engine, REQUESTS, [response.tokens for response in plain])
    engine.set_k(0)
    assert engine.generate(REQUESTS[:8]).stats.num_drafts == 0
