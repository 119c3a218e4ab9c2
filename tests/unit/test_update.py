from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specrl.config import Config, parse_config
from specrl.distributed import Ranks
from specrl.precision.mismatch import MismatchSums
from specrl.schemas import Rollout
from specrl.training.rollouts import RolloutBatch
from specrl.training.shares import TrainingShares, deal_groups
from specrl.training.update import LossInputRows, _loss, _micro_batches, align

ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def test_align_puts_values_where_the_mask_is_true() -> None:
    mask = torch.tensor([[False, True, True, False], [True, False, False, False]])
    assert align([[1.0, 2.0], [3.0]], mask).tolist() == [[0, 1, 2, 0], [3, 0, 0, 0]]


def test_micro_batches_are_padded_as_the_policy_needs() -> None:
    policy: Any = SimpleNamespace(dp_rank=0, dp_size=1, tp_rank=0, pp_rank=0, pp_size=1, pad_multiple=16, ranks=ALONE)
    lengths = (3, 14, 30)
    rollouts = [
        Rollout(0, 0, 0, i, 0, 0, 0, [5, 6], [7] * length, [0.0] * length, "", "", "stop")
        for i, length in enumerate(lengths)
    ]
    batch = RolloutBatch.gather(ALONE, rollouts)
    shares = TrainingShares.of(policy, batch, [[0, 1, 2]])
    batches = _micro_batches(policy, shares.deliver(batch), shares.own(0), Config(name="pad"))
    assert [len(batch.tokens) for batch in batches] == [64]  # the prompt once
    assert [batch.num_tokens for batch in batches] == [sum(lengths)]


def test_align_refuses_another_number_of_values() -> None:
    with pytest.raises(AssertionError):
        align([[1.0]], torch.tensor([[True, True]]))


@pytest.mark.parametrize("correction", ["tis", "icepop", "seq-mask"])
def test_truncated_sampling_is_no_mismatch(correction: str) -> None:
    """The engine's log-probs are of the nucleus, the trainer's of the whole distribution: only numerics may differ."""
    whole, mass = [-2.0, -1.5, -3.0], [-0.7, 0.0, -2.5]
    sampled = [a - b for a, b in zip(whole, mass, strict=True)]
    rollout = Rollout(
        *(0, 0, 0, 0, 0, 0, 0, [5], [6, 7, 8], sampled, "", "", "stop"), advantage=1.0, policy_logprobs=whole
    )
    config = parse_config({"name": "truncated", "train": {"correction": correction}})
    policy: Any = SimpleNamespace(dp_rank=0, dp_size=1, tp_rank=0, pp_rank=0, pp_size=1, pad_multiple=1, ranks=ALONE)

    def loss() -> float:
        rollouts = RolloutBatch.gather(ALONE, [rollout])
        shares = TrainingShares.of(policy, rollouts, [[0]])
        own = shares.deliver(rollouts)
        batch = _micro_batches(policy, own, shares.own(0), config)[0]
        logprobs = align([whole], batch.mask)
        rows = LossInputRows(rollouts.advantages, own, {}, {})
        return float(_loss(rows, 3, config, {})(logprobs, logprobs, batch)[0])

    def mismatch() -> dict[str, float]:
        return MismatchSums.of(rollout.policy_logprobs or [], rollout.whole_generation_logprobs).metrics()

    rollout.log_kept_mass = mass
    assert loss() == pytest.approx(-1.0, abs=1e-6)  # a weight of 1 and an advantage of 1 at each token
    assert mismatch()["mismatch/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-6)
    assert mismatch()["mismatch/importance_ratio_p50"] == pytest.approx(1.0, abs=1e-6)
    rollout.log_kept_mass = None  # as if nothing had been dropped
    assert loss() > -0.6
    assert mismatch()["mismatch/token_mult_prob_error"] > 4


def group_rollouts(groups: int, responses: int) -> RolloutBatch:
    rollouts = [
        Rollout(0, 0, prompt, sample, 0, 0, 0, [prompt] * 50, [7] * (10 + sample), [0.0] * 10, "", "", "stop")
        for prompt in range(groups)
        for sample in range(responses)
    ]
    return RolloutBatch.gather(ALONE, rollouts)


@pytest.mark.parametrize(("groups", "shares"), [(4, 2), (3, 3), (5, 1)])
def test_the_responses_to_a_prompt_are_trained_on_by_one_rank(groups: int, shares: int) -> None:
    batch = group_rollouts(groups, 4)
    dealt = deal_groups(batch, range(4 * groups), np.zeros(4 * groups, np.int64), shares)
    assert sorted(number for share in dealt for number in share) == list(range(4 * groups))
    prompts = [sorted(batch.prompt_ids[share].tolist()) for share in dealt]
    assert all(own.count(prompt) == 4 for own in prompts for prompt in own)
    assert [len(set(own)) for own in prompts] == [groups // shares] * shares


def test_a_group_is_divided_where_a_rank_would_have_nothing_to_do() -> None:
    batch = group_rollouts(1, 4)
    dealt = deal_groups(batch, range(4), np.zeros(4, np.int64), 2)
    assert sorted(map(len, dealt)) == [2, 2]
    assert deal_groups(batch, [], np.zeros(4, np.int64), 2) == [[], []]
