"""Drafts from text on vLLM's second model runner: no text changes a token (FP32), and all of it is compared."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specrl.rollout.drafts.text_index import DRAFTERS, OWN, RECENT_TEXT, STORED, Text
from specrl.rollout.requests import Request
from tests.exactness import second_runner
from tests.exactness.engines import mixed_requests
from tests.exactness.text_runner import Answers, Stored, generate
from tests.exactness.toy import likely_tokens, policy_weights, write_policy
from tests.mtp_models import write_mtp_model
from tests.text_drafting import Ask, follow

pytestmark = pytest.mark.engine
REQUESTS = mixed_requests(96, longest_prompt=70, max_tokens=64)
STOP = likely_tokens()[3]
K = 5
WORTH = (9.0, 5, 4, 3, 2, 4.5, 3.5, 2.5, 1.5, 2.2)
"""The accepted tokens that drafts of each kind are said to bring; the drafter's surpass text that agrees by little."""
TIGHT = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 5 << 19, "enable_prefix_caching": False}
SCHEDULE = [(1, 2, 5), (3, 8, 3), (9, 16, 1), (17, 32, 0)]
NGRAM = {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def in_own_process(function: Any, *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def plain(directories: tuple[Path, Path]) -> list[list[int]]:
    result = in_own_process(second_runner.generate, directories[0], REQUESTS, STOP, None, {})
    return [answer.tokens for answer in result.answers]


def by_prompt(requests: list[Request], rows: list[list[int]]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    texts: dict[tuple[int, ...], list[list[int]]] = {}
    seeds: dict[tuple[int, ...], list[int]] = {}
    for request, row in zip(requests, rows, strict=True):
        texts.setdefault(tuple(request.prompt_tokens), []).append(row)
        seeds.setdefault(tuple(request.prompt_tokens), []).append(request.seed)
    return texts, seeds


def altered(index: int, tokens: list[int]) -> list[int]:
    """The text that an older policy wrote: the same, with a token that differs, or cut off."""
    middle = len(tokens) // 2
    if index % 4 == 1 and tokens:
        return [*tokens[:middle], tokens[middle] + 1, *tokens[middle + 1 :]]
    return tokens[:middle] if index % 4 == 2 else tokens


def generations(plain: list[list[int]]) -> list[Stored]:
    """Nothing; the very answers by their seeds; altered ones and recent ones; other seeds' text; recent text alone."""
    older = [altered(index, tokens) for index, tokens in enumerate(plain)]
    others = [older[index - 1] for index in range(len(older))]
    return [
        Stored(),
        Stored(*by_prompt(REQUESTS, plain)),
        Stored(*by_prompt(REQUESTS, older), recent=plain[:20]),
        Stored(by_prompt(REQUESTS, older)[0]),
        Stored(recent=others),
    ]


def texts_of(stored: Stored) -> list[Text]:
    texts = []
    for number, (prompt, rows) in enumerate(stored.texts.items()):
        seeds: Any = stored.seeds[prompt] if stored.seeds else [None] * len(rows)
        texts += [Text(row, number, seed) for row, seed in zip(rows, seeds, strict=True)]
    return texts + [Text(row) for row in reversed(stored.recent)]


def expected(stored: Stored, plain: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What all drafts from text come to in plain Python; see `Counts`."""
    numbers = {prompt: number for number, prompt in enumerate(stored.texts)}
    texts, found = texts_of(stored), []
    for request, answer in zip(REQUESTS, plain, strict=True):
        ask = Ask(numbers.get(tuple(request.prompt_tokens), -2), request.seed)
        found.append(follow(texts, ask, answer, request.max_tokens, K, WORTH))
    return sum(one.seen for one in found), sum(one.right for one in found)


def right(answers: Answers, first: int, last: int) -> int:
    """The tokens that drafts of these kinds had right."""
    return int(answers.counts.right[first : last + 1].sum())


@pytest.mark.parametrize(
    ("method", "drafter_k", "options"),
    [
        ("replay", 0, {}),
        ("replay", 0, TIGHT),
        ("eagle3+replay", 3, {}),
        ("eagle3+replay", 3, {"schedule": SCHEDULE}),
        ("draft_model+replay", 2, {"async_scheduling": False}),
        ("ngram+replay", 3, {}),
    ],
)
def test_text_changes_no_token_and_is_compared(
    directories: tuple[Path, Path],
    plain: list[list[int]],
    tmp_path: Path,
    method: str,
    drafter_k: int,
    options: dict[str, Any],
) -> None:
    policy, drafter = directories
    own, settings = method.removesuffix("+replay"), dict(options)
    speculative: dict[str, Any] = {"method": own, "model": str(drafter)}
    if own == "draft_model":
        speculative["model"] = str(write_policy(tmp_path / "policy", policy_weights(5)))
    if own in ("replay", "ngram"):
        speculative = dict(NGRAM)
    if "schedule" in settings:
        speculative["num_speculative_tokens_per_batch_size"] = settings.pop("schedule")
    speculative["num_speculative_tokens"] = K
    worth = dict(enumerate(WORTH))
    offered = generations(plain)
    results = in_own_process(generate, policy, REQUESTS, STOP, speculative, drafter_k, offered, worth, settings)
    for answers in results:
        assert answers.tokens == plain
    num_tokens = sum(map(len, plain))
    nothing, same, older, others, recent = results
    assert (right(nothing, DRAFTERS, DRAFTERS) > 50) == (drafter_k > 0)
    assert right(nothing, OWN, DRAFTERS - 1) == 0
    assert right(others, STORED, RECENT_TEXT - 1) > 50
    assert right(recent, RECENT_TEXT, DRAFTERS - 1) > 20
    assert right(older, RECENT_TEXT, DRAFTERS - 1) > 0
    assert same.counts.right[OWN, 0] > 0.9 * same.counts.seen[OWN, 0] > 20
    if "schedule" not in options:
        assert right(same, OWN, OWN) > 0.7 * num_tokens
        assert same.counts.offered.sum() < 0.45 * num_tokens, "the iterations of all requests"
    assert results[-1].num_preempted > 0 or options is not TIGHT
    if drafter_k == 0 and options is not TIGHT:
        for answers, stored in zip(results, offered, strict=True):
            seen, were_right = expected(stored, plain)
            assert (answers.counts.seen == seen).all()
            assert (answers.counts.right == were_right).all()


def test_a_policys_own_layer_drafts_beside_text(tmp_path: Path) -> None:
    policy, options = write_mtp_model(tmp_path / "policy", "mimo"), {"max_model_len": 128}
    requests = [request for request in REQUESTS if len(request.prompt_tokens) + request.max_tokens < 120][:40]
    result = in_own_process(second_runner.generate, policy, requests, STOP, None, options)
    plain = [answer.tokens for answer in result.answers]
    speculative = {"method": "mtp", "num_speculative_tokens": K}
    offered = [Stored(), Stored(*by_prompt(requests, plain))]
    worth = dict(enumerate(WORTH))
    nothing, same = in_own_process(generate, policy, requests, STOP, speculative, 2, offered, worth, options)
    assert nothing.tokens == same.tokens == plain
    assert nothing.counts.seen[DRAFTERS].sum() > 100
    assert right(same, OWN, OWN) > 0.7 * sum(map(len, plain))
