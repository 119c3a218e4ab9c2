"""A mixture of experts in the engine: its refits, and the experts that it reports for every token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specrl.rollout.drafts.acceptance import OWN_TEXT
from specrl.rollout.engine import Engine, Request, Response, StoredText
from specrl.rollout.errors import PolicyParityError
from specrl.rollout.vllm.weights.load import read_weights
from tests.exactness.engines import running, verify_policy
from tests.exactness.experts import LAYERS, routes_of, write_expert_drafter, write_expert_policy
from tests.exactness.test_token_for_token import count_preemptions
from tests.exactness.toy import toy_config

pytestmark = pytest.mark.engine
SHARED = 140
"""The tokens with which some prompts begin, several blocks of the KV cache that later requests find there."""
TIGHT = {"max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 16}
"""Long prompts are read in chunks, and the KV cache is too small for all running requests: some are preempted."""


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("experts")
    return [write_expert_policy(root / f"policy-{seed}", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def engine(policies: list[Path]) -> Iterator[Engine]:
    drafter = write_expert_drafter(policies[0].parent / "drafter", policies[0])
    config = toy_config("eagle3+replay", 3, max_length=256, max_num_seqs=6)
    with running(policies[0], drafter, config, **TIGHT) as engine:
        yield engine


def requests() -> list[Request]:
    generator = random.Random(0)
    shared = [generator.randint(4, 100) for _ in range(SHARED)]
    found = []
    for index in range(10):
        own = [generator.randint(4, 100) for _ in range(generator.randint(90, 120))]
        prompt = [*shared, *own[:8]] if index % 2 else own
        found.append(Request(prompt, index + 1, generator.randint(30, 50), 1.0))
    return found


def assert_routes(policy: Path, responses: list[Response]) -> None:
    sequences = [asked.prompt_tokens + got.tokens for asked, got in zip(requests(), responses, strict=True)]
    for got, expected in zip(responses, routes_of(policy, sequences), strict=True):
        assert got.routes is not None and got.routes.dtype == np.uint8 and got.routes.shape[1] == LAYERS
        np.testing.assert_array_equal(np.sort(got.routes, -1), expected)


def test_routes_are_those_of_the_tokens_that_were_kept(engine: Engine, policies: list[Path]) -> None:
    """Read in chunks, found in the prefix cache, computed again after a preemption, drafted and rejected."""
    engine.set_k(0)
    plain = engine.generate(requests(), routes=True).responses
    assert_routes(policies[0], plain)
    pairs = zip(requests(), plain, strict=True)
    texts = [StoredText(asked.prompt_tokens, wrong(got.tokens), asked.seed) for asked, got in pairs]
    engine.set_replay([text._replace(seed=None) for text in texts])
    engine.set_k(engine.longest_k)
    preempted = count_preemptions(engine)
    drafted = engine.generate(requests(), routes=True)
    assert len(preempted) > 2
    assert [got.tokens for got in drafted.responses] == [got.tokens for got in plain]
    assert 0 < drafted.stats.num_accepted_tokens < drafted.stats.num_draft_tokens
    assert_routes(policies[0], drafted.responses)
    engine.reset_prefix_cache()
    engine.set_replay(texts)
    read = engine.generate(requests(), routes=True)
    assert [got.tokens for got in read.responses] == [got.tokens for got in plain]
    assert read.stats.by_source[OWN_TEXT].num_accepted_tokens > 0
    assert_routes(policies[0], read.responses)
    assert engine.generate(requests()[:1]).responses[0].routes is None
    sequences = [asked.prompt_tokens + got.tokens for asked, got in zip(requests(), plain, strict=True)]
    for routes, got in zip(engine.score(sequences)[1], plain, strict=True):
        np.testing.assert_array_equal(np.sort(routes, -1), np.sort(got.routes, -1))


def wrong(tokens: list[int]) -> list[int]:
    """The same text, with two other tokens in its middle."""
    middle = len(tokens) // 2
    return [*tokens[:middle], 101, 102, *tokens[middle:]]


def test_a_refit_brings_every_expert_and_the_comparison_sees_a_wrong_one(engine: Engine, policies: list[Path]) -> None:
    """vLLM's own reload leaves experts on a CPU unpacked, and computes nonsense without an error."""
    weights = dict(read_weights(policies[1]))
    engine.refit(weights.items(), None)
    verify_policy(engine, weights.items())
    engine.set_k(0)
    assert_routes(policies[1], engine.generate(requests(), routes=True).responses)
    swapped = [f"model.layers.3.mlp.experts.{number}.up_proj.weight" for number in (2, 5)]
    weights |= {name: weights[other] for name, other in zip(swapped, reversed(swapped), strict=True)}
    with pytest.raises(PolicyParityError, match="differs from the trainer's in") as error:
        verify_policy(engine, weights.items())
    named = str(error.value).partition(" in ")[2].split(", ")
    parts = ("gate_proj", "up_proj", "down_proj")
    assert named == [f"model.layers.3.mlp.experts.{number}.{part}.weight" for number in (2, 5) for part in parts]
