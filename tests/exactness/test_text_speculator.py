"""Drafts from text beside every drafter: no text changes a token (FP32), and what text was right is counted exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrl.config import Config
from specrl.rollout.drafts.device_drafts import Counts
from specrl.rollout.drafts.text_index import DRAFTERS, RECENT_TEXT, STORED, Text, number_of
from specrl.rollout.engine import Engine, Request, StoredText
from tests.exactness.conftest import Start
from tests.exactness.engines import mixed_requests, running
from tests.exactness.toy import policy_weights, toy_config, write_policy
from tests.mtp_models import write_mtp_model
from tests.text_drafting import Compared, follow
from tests.waits import counting

pytestmark = pytest.mark.engine


REQUESTS = mixed_requests(64, longest_prompt=70, max_tokens=48)
K = 5
WORTH = (5.0, 4, 3, 2, 4.5, 3.5, 2.5, 1.5, 2.2, 2.2)
"""The accepted tokens that drafts of each kind are said to bring; the drafter's surpass text that agrees by little."""
CHUNKED = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
"""Prompts are read in pieces, beside requests that decode."""


@dataclass(frozen=True)
class Stored:
    """What there is to draft from in one generation; without seeds, so that none of it is read ahead of decoding."""

    texts: list[StoredText] = field(default_factory=list)
    recent: Sequence[list[int]] = ()


@pytest.fixture(scope="module")
def plain(engine_of: Start) -> list[list[int]]:
    return [response.tokens for response in engine_of("none").generate(REQUESTS).responses]


def config_of(method: str, k: int, **options: Any) -> Config:
    config = toy_config(method, k, **options)
    return config.model_copy(update={"speculation": config.speculation.model_copy(update={"replay_k": K})})


def by_prompt(requests: Sequence[Request], rows: Sequence[list[int]]) -> Stored:
    return Stored([StoredText(asked.prompt_tokens, row) for asked, row in zip(requests, rows, strict=True)])


def altered(index: int, tokens: list[int]) -> list[int]:
    """The text that an older policy wrote: the same, with a token that differs, or cut off."""
    middle = len(tokens) // 2
    if index % 4 == 1 and tokens:
        return [*tokens[:middle], tokens[middle] + 1, *tokens[middle + 1 :]]
    return tokens[:middle] if index % 4 == 2 else tokens


def answers(engine: Engine, requests: Sequence[Request], stored: Stored) -> tuple[list[list[int]], Counts]:
    """The tokens of all responses, and what the drafts of each kind came to."""
    drafting: Any = engine.drafting
    engine.set_replay(stored.texts)
    engine.set_recent([stored.recent])
    drafting.costs.acceptance.accepted = lambda: np.tile(WORTH, (K + 1, 1))
    generation = engine.generate(list(requests), recall=True)
    return [response.tokens for response in generation.responses], drafting._text.drafts.counts()


def expected(stored: Stored, plain: Sequence[list[int]]) -> Compared:
    """What all drafts from text come to in plain Python."""
    texts = [Text(row) for row in reversed(stored.recent)]
    texts += [Text(text.tokens, number_of(text.prompt_tokens)) for text in stored.texts]
    found = []
    for request, answer in zip(REQUESTS, plain, strict=True):
        found.append(follow(texts, number_of(request.prompt_tokens), answer, request.max_tokens, K, WORTH))
    return Compared(np.sum([one.seen for one in found], 0), np.sum([one.right for one in found], 0))


def count_waits(engine: Engine, waits: Counter[str]) -> None:
    """Count what drafts make the host wait for, from now on."""
    drafting: Any = engine.drafting
    speculator = drafting._engine.runner.speculator
    propose = speculator.propose

    def counted(*arguments: Any, **options: Any) -> Any:
        with counting(waits):
            return propose(*arguments, **options)

    speculator.propose = counted


def right(counts: Counts, first: int, last: int) -> int:
    """The tokens that drafts of these kinds had right."""
    return int(counts.right[first : last + 1].sum())


@pytest.mark.parametrize(
    ("method", "k", "overrides"),
    [
        ("replay", K, {}),
        ("replay", K, CHUNKED),
        ("eagle3+replay", 3, {}),
        ("draft_model+replay", 2, {"async_scheduling": False}),
        ("ngram+replay", 3, {}),
    ],
)
def test_text_changes_no_token_and_is_compared(
    directories: tuple[Path, Path],
    plain: list[list[int]],
    tmp_path: Path,
    method: str,
    k: int,
    overrides: dict[str, Any],
) -> None:
    policy, drafter = directories
    model = write_policy(tmp_path / "policy", policy_weights(5)) if method.startswith("draft_model") else None
    older = [altered(index, tokens) for index, tokens in enumerate(plain)]
    offered = [
        Stored(),
        by_prompt(REQUESTS, plain),
        by_prompt(REQUESTS, older),
        Stored(recent=[older[index - 1] for index in range(len(older))]),
    ]
    waits: Counter[str] = Counter()
    with running(policy, drafter, config_of(method, k, draft_model=model), **overrides) as engine:
        if method == "replay":  # beside a drafter, whose kernels NumPy stands in for, one could not tell
            count_waits(engine, waits)
        found = [answers(engine, REQUESTS, stored) for stored in offered]
    assert not waits, "drafting from text waits for the device"
    assert all(tokens == plain for tokens, _ in found)
    nothing, same, changed, recent = (counts for _, counts in found)
    assert (right(nothing, DRAFTERS, DRAFTERS) > 30) == (method != "replay")
    assert right(nothing, STORED, DRAFTERS - 1) == 0
    num_tokens = sum(map(len, plain))
    assert right(same, STORED, RECENT_TEXT - 1) > 0.7 * num_tokens
    # While a prompt is read in pieces, its first token is predicted several times.
    assert overrides is CHUNKED or same.offered.sum() < 0.45 * num_tokens, "the iterations of all requests"
    assert 0 < right(changed, STORED, RECENT_TEXT - 1) < right(same, STORED, RECENT_TEXT - 1)
    assert right(recent, STORED, RECENT_TEXT - 1) == 0 < right(recent, RECENT_TEXT, DRAFTERS - 1)
    if method == "replay" and overrides is not CHUNKED:
        for (_, counts), stored in zip(found, offered, strict=True):
            wanted = expected(stored, plain)
            assert (counts.seen == wanted.seen).all()
            assert (counts.right == wanted.right).all()


def test_a_policys_own_layer_drafts_beside_text(tmp_path: Path) -> None:
    policy = write_mtp_model(tmp_path / "policy", "mimo")
    requests = [request for request in REQUESTS if len(request.prompt_tokens) + request.max_tokens < 120][:40]
    with running(policy, None, config_of("mtp+replay", 2, max_length=128)) as engine:
        engine.set_k(0)
        plain = [response.tokens for response in engine.generate(requests).responses]
        engine.set_k(2)
        (first, nothing), (second, same) = (
            answers(engine, requests, stored) for stored in (Stored(), by_prompt(requests, plain))
        )
    assert first == second == plain
    assert nothing.seen[DRAFTERS].sum() > 100
    assert right(same, STORED, RECENT_TEXT - 1) > 0.7 * sum(map(len, plain))
