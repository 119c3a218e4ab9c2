"""BF16: what differs with speculation is a near-tie, sampled and greedy; and what is no near-tie fails the gates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specrl.precision.near_ties import compare, measure_noise
from specrl.rollout.engine import Engine
from specrl.validation.exactness import check, measure_exactness, traces
from tests.exactness.engines import in_batches, mixed_requests, running
from tests.exactness.toy import drafter_weights, policy_weights, toy_config, write_drafter, write_policy

pytestmark = pytest.mark.engine
DTYPE = "bfloat16"
REQUESTS = mixed_requests(32, max_tokens=96)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("bf16")
    policy = write_policy(root / "policy", policy_weights(0), dtype=DTYPE)
    drafter = write_drafter(root / "drafter", drafter_weights(1, DTYPE), DTYPE)
    with running(policy, drafter, toy_config("eagle3", 3, dtype=DTYPE)) as engine:
        yield engine


def test_every_difference_in_bf16_is_a_near_tie(engine: Engine) -> None:
    result = measure_exactness(engine, REQUESTS, engine.longest_k)
    check(result)
    assert 0 < result.num_accepted_tokens < result.num_draft_tokens
    assert result.sampled.num_tokens > 1000 and result.greedy.num_tokens > 1000
    assert result.sampled.lead_noise < 0.2  # none at all where a toy's shapes round alike


def test_recording_changes_no_token(engine: Engine) -> None:
    engine.set_k(0)
    plain = [response.tokens for response in in_batches(engine, REQUESTS, len(REQUESTS))]
    recorded = traces(engine, REQUESTS, len(REQUESTS), 0)
    assert [[pick.token for _, pick in sorted(trace.items())] for trace in recorded] == plain


def test_another_policy_is_no_near_tie(engine: Engine) -> None:
    """The control: refitted to slightly other weights, the engine differs by more than noise."""
    plain = traces(engine, REQUESTS, len(REQUESTS), 0)
    noise = measure_noise(plain, traces(engine, REQUESTS, 4, 0))
    weights = {name: tensor.bfloat16() for name, tensor in policy_weights(0).items()}
    moved = {name: (tensor * 1.3 if "down_proj" in name else tensor) for name, tensor in weights.items()}
    engine.refit(moved.items(), drafter_weights(1, DTYPE).items())
    other = traces(engine, REQUESTS, len(REQUESTS), 3)
    engine.refit(weights.items(), drafter_weights(1, DTYPE).items())
    assert compare(plain, other, noise).num_unexplained > 0
