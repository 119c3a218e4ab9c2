"""The baseline: rollouts as lists of Python numbers, which every rank pickles and every rank unpickles.

This is how ranks exchanged rollouts before `specrl.distributed.arrays`. Nothing but this benchmark uses it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from specrl.distributed import Ranks
from specrl.precision.mismatch import QUANTILES
from specrl.schemas import Rollout

T = TypeVar("T")


@dataclass
class ListRollout:
    """A rollout whose tokens and log-probs are lists."""

    prompt_id: int
    sample: int
    reward: float
    prompt_tokens: list[int]
    response_tokens: list[int]
    generation_logprobs: list[float]
    response: str
    policy_logprobs: list[float] | None = None

    @classmethod
    def of(cls, rollout: Rollout) -> ListRollout:
        """Return a rollout with lists instead of arrays."""
        return cls(
            rollout.prompt_id,
            rollout.sample,
            rollout.reward,
            rollout.prompt_tokens,
            list(rollout.response_tokens),
            list(rollout.generation_logprobs),
            rollout.response,
        )


def gather(ranks: Ranks, value: T) -> list[T]:
    """Return the values of all ranks on every rank, pickled (collective)."""
    values: list[T] = [value] * ranks.world_size
    dist.all_gather_object(values, value)
    return values


def exchange_rollouts(ranks: Ranks, own: Sequence[ListRollout]) -> list[ListRollout]:
    """Return the rollouts of all ranks, in the order of prompts and samples (collective)."""
    everyone = [rollout for share in gather(ranks, list(own)) for rollout in share]
    return sorted(everyone, key=lambda rollout: (rollout.prompt_id, rollout.sample))


def exchange_logprobs(ranks: Ranks, rollouts: Sequence[ListRollout], own: dict[int, list[float]]) -> None:
    """Write each rank's log-probs into every rank's copy of the rollouts (collective)."""
    for rank in gather(ranks, own):
        for index, row in rank.items():
            rollouts[index].policy_logprobs = row


def compare_engines(rollouts: Sequence[ListRollout]) -> dict[str, float]:
    """Return how far the engines disagree about all tokens, which every rank computes alone."""
    trained = torch.tensor([value for rollout in rollouts for value in rollout.policy_logprobs or ()])
    generated = torch.tensor([value for rollout in rollouts for value in rollout.generation_logprobs])
    log_r = trained.double() - generated.double()
    terms = log_r.abs().exp().sort().values
    ordered = log_r.exp().sort().values
    kept = len(terms) - max(1, len(terms) // 1000)
    quantiles = {share: float(ordered[math.ceil(share * len(ordered)) - 1]) for share in QUANTILES}
    return {
        "token_mult_prob_error": float(terms.mean()),
        "bulk_error": float(terms[:kept].mean()),
        "kl": float((log_r.expm1() - log_r).mean()),
        **{f"p{share:g}": value for share, value in quantiles.items()},
    }
