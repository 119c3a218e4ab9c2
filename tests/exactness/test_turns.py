"""Conversations with an environment have the same tokens with every draft source as in plain decoding (FP32)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from specrl.config import Config, EnvironmentConfig
from specrl.data.problems import Prompt
from specrl.data.rewards.pool import RewardPool
from specrl.rollout.collect import Origin, collect
from specrl.rollout.conversations import open_prompts
from specrl.rollout.engine import Engine
from specrl.schemas import Rollout, sampled_mask
from tests.exactness.conftest import Start
from tests.exactness.toy import toy_config

pytestmark = pytest.mark.engine
ENVIRONMENT = EnvironmentConfig(name="tests.integration.loop_plan:Letters", max_turns=3)
CONFIG: Config = toy_config().model_copy(update={"environment": ENVIRONMENT})
NUM_PROMPTS, SAMPLES = 6, 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    found = RewardPool(CONFIG.data, environment=ENVIRONMENT.name)
    yield found
    found.close()


def conversations(engine: Engine, pool: RewardPool) -> list[Rollout]:
    prompts = []
    for number in range(NUM_PROMPTS):
        question = "a" * (number + 2)
        metadata: dict[str, Any] = {"question": question, "generator": 0, "entry": {}}
        prompts.append(Prompt(number, question, engine.tokenizer(question)["input_ids"], "", metadata))
    engine.reset_prefix_cache()
    opened = open_prompts(engine, prompts, CONFIG, pool)
    return collect(engine, opened, SAMPLES, CONFIG, pool, Origin(1, 2), recall=True).scored()[0]


@pytest.mark.parametrize("method", ["eagle3+replay", "ngram"])
def test_drafts_change_no_token_of_any_turn(engine_of: Start, pool: RewardPool, method: str) -> None:
    plain, drafted = (conversations(engine_of(name), pool) for name in ("none", method))
    assert max(len(row.turns) for row in plain) == 5
    for row, other in zip(plain, drafted, strict=True):
        assert (row.response_tokens, row.turns, row.reward) == (other.response_tokens, other.turns, other.reward)
    assert sum(row.num_accepted_tokens for row in drafted) > 0


def test_the_log_probs_of_all_turns_are_those_of_the_whole_row(engine_of: Start, pool: RewardPool) -> None:
    engine = engine_of("ngram")
    rows = conversations(engine, pool)
    logprobs, _ = engine.score([[*row.prompt_tokens, *row.response_tokens] for row in rows])
    for row, found in zip(rows, logprobs, strict=True):
        of_response = np.array(found[len(row.prompt_tokens) - 1 :])
        own = of_response[sampled_mask(row.turns or [len(row.response_tokens)])]
        assert own == pytest.approx(np.array(row.generation_logprobs), abs=1e-4)
