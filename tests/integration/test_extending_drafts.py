"""The draft source of CONTRIBUTING.md in an engine: it drafts, and no token is another than without it (FP32)."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl.rollout.drafts.acceptance import DRAFTER
from tests.drafts import recipe
from tests.exactness.engines import mixed_requests, running
from tests.exactness.toy import policy_weights, toy_config, write_policy

pytestmark = pytest.mark.engine
REQUESTS = mixed_requests(24, seed=8)


@pytest.mark.parametrize("method", ["ngram8+replay", "ngram8"])
def test_the_recipes_draft_and_change_no_token(tmp_path: Path, method: str) -> None:
    write_policy(tmp_path / "policy", policy_weights(0))
    with recipe(tmp_path), running(tmp_path / "policy", None, toy_config(method, 4)) as engine:
        assert engine.replays == (method == "ngram8+replay")
        speculative = engine.generate(REQUESTS)
        engine.set_k(0)
        plain = engine.generate(REQUESTS)
    assert plain.stats.num_drafts == 0
    assert [response.tokens for response in speculative.responses] == [response.tokens for response in plain.responses]
    assert set(speculative.stats.by_source) == {DRAFTER}
    assert speculative.stats.num_accepted_tokens > 0
