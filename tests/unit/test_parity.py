"""Log-probs on the probe tell whether a refit arrived, however small the step was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specrl.config import Config
from specrl.rollout.errors import PolicyParityError
from specrl.rollout.refit.policy_probe import RefitProbe, check_moved_on, probe_sequences
from specrl.schemas import Rollout, write_rollouts
from specrl.training.batches import MicroBatch

OLD, NEW = [[-1.0, -2.0], [-0.5]], [[-1.02, -1.97], [-0.51]]


def shifted(rows: list[list[float]], by: float) -> list[list[float]]:
    return [[value + by for value in row] for row in rows]


def test_an_engine_left_at_the_old_policy_is_found_within_every_tolerance() -> None:
    with pytest.raises(PolicyParityError, match="still computes with an earlier policy"):
        check_moved_on(shifted(OLD, 0.002), NEW, OLD)


def test_an_engine_that_follows_is_seen_to() -> None:
    assert check_moved_on(shifted(NEW, 0.002), NEW, OLD)


def test_a_step_smaller_than_the_engines_rounding_tells_nothing() -> None:
    assert not check_moved_on(shifted(NEW, 0.03), NEW, OLD)
    assert not check_moved_on(OLD, OLD, OLD)


def test_rounding_that_makes_a_few_tokens_look_old_is_no_alarm() -> None:
    """Learning rates of 1e-6 move BF16 weights so little that the trainer's own rounding is most of what is seen: a few
    tokens, at which the policy is of two minds, then make an engine that follows look nearer to the earlier policy."""
    old = [[-1.0] * 64 for _ in range(4)]
    engine = [[value + 0.001 * (-1) ** place for place, value in enumerate(row)] for row in old]
    new = [[value + 0.0015 * (-1) ** place for place, value in enumerate(row)] for row in old]
    new[0][:3] = [-2.0, -0.2, -1.8]
    assert not check_moved_on(engine, new, old)


def test_the_trainers_share_the_sequences_of_the_probe() -> None:
    """Every engine is compared on all of them, so that a trainer with another policy than the others is found, too."""
    sequences, scored, parts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]], list[int](), list[dict[int, list[float]]]()

    def logprobs(batches: list[MicroBatch]) -> list[Tensor]:
        scored.extend(index for batch in batches for index in batch.indices)
        return [torch.zeros(batch.mask.shape).masked_scatter(batch.mask, -0.1 * batch.targets) for batch in batches]

    def gather(part: dict[int, list[float]]) -> list[dict[int, list[float]]]:
        parts.append(part)
        return parts

    def trainer(rank: int) -> Any:
        return SimpleNamespace(
            dp_rank=rank, dp_size=2, pad_multiple=1, logprobs=logprobs, ranks=SimpleNamespace(gather=gather)
        )

    probe = RefitProbe(sequences, Config(name="probe"))
    with pytest.raises(KeyError):
        probe._trainer_logprobs(trainer(1), [None] * 3)  # the other rank's have not come
    found = probe._trainer_logprobs(trainer(0), [None] * 3)
    assert scored == [1, 0, 2]
    assert found == [pytest.approx([-0.1 * token for token in tokens[1:]]) for tokens in sequences]


def test_the_probe_has_the_end_of_one_response_to_each_prompt(tmp_path: Path) -> None:
    (tmp_path / "step=000000").mkdir()
    common = [*range(1, 41)]  # a prompt may begin as all others do
    rollouts = [make_rollout([*common, prompt], [50 + sample, 60]) for prompt in range(3) for sample in range(2)]
    write_rollouts(tmp_path / "step=000000" / "rank-0.arrow", rollouts)
    assert probe_sequences(tmp_path, 4) == [[40, prompt, 50, 60] for prompt in range(3)]


def make_rollout(prompt: list[int], response: list[int]) -> Rollout:
    logprobs = [-1.0] * len(response)
    return Rollout(0, 0, 0, 0, 0, 0, 0, prompt, response, logprobs, "", "", "stop")
