"""The probe of the policy after every refit: the engine's log-probs must be the trainer's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from specrl.config import Config, PrecisionConfig
from specrl.rollout.engine import Engine
from specrl.rollout.refit.parity import ParityReport, check_moved_on, check_policy
from specrl.schemas import read_rollouts
from specrl.training.batches import TokenSequence, pack
from specrl.training.megatron.policy import Policy

NUM_SEQUENCES = 4
MAX_TOKENS = 32
"""The longest sequence: the weights are compared apart from them."""
MAX_TOKENS_ALONE = 64
"""The longest where weights cannot be compared, and log-probs have to show that they arrived."""


def probe_sequences(rollouts_dir: Path, longest: int) -> list[list[int]]:
    """Read a few of the policy's own responses with their prompts, of which the last `longest` tokens differ most."""
    first = sorted(rollouts_dir.glob("step=*/rank-*.arrow"))[0]
    rollouts = {tuple(rollout.prompt_tokens): rollout for rollout in reversed(read_rollouts(first))}
    chosen = list(reversed(rollouts.values()))[:NUM_SEQUENCES]
    return [[*rollout.prompt_tokens, *rollout.response_tokens][-longest:] for rollout in chosen]


def expected_difference(config: PrecisionConfig) -> float:
    """By how much `precision.max_kl` raises mean |log p_engine - log p_trainer|, in nats; 0 in equal precision.

    If log-ratios are normal with a variance of s^2, the KL divergence is s^2 / 2 and their mean magnitude is below s.
    """
    same = config.generation == config.training and config.kv_cache == "bf16"
    return 0.0 if same else math.sqrt(2 * config.max_kl)


def from_first(routes: list[NDArray[Any] | None]) -> list[NDArray[Any] | None]:
    """Broadcast routes (collective)."""
    values = [routes]  # ranks that share a policy must send a token to the same experts, and have engines of their own
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    return values[0]


class RefitProbe:
    """Compares engine and trainer on a few sequences (invariant 4); the drafter has a guard of its own."""

    def __init__(self, sequences: list[list[int]], config: Config) -> None:
        self._sequences = sequences
        self._tolerance = config.engine.parity_tolerance + expected_difference(config.precision)
        self._earlier: list[list[float]] | None = None
        """The trainer's log-probs under the last policy that the engine was shown to hold, at first any."""

    def check(self, engine: Engine, policy: Policy) -> ParityReport:
        """Compare the log-probs of engine and trainer (collective).

        Raises:
            PolicyParityError: They differ on average by more than `engine.parity_tolerance` and `expected_difference`
                allow, or are still those of an earlier policy.
        """
        scores = engine.score(self._sequences)
        found = [score.logprobs for score in scores]
        routes = [score.routes for score in scores]
        trainer = self._trainer_logprobs(policy, routes if policy.routing is None else from_first(routes))
        report = check_policy(found, trainer, self._tolerance)
        if self._earlier is None or check_moved_on(found, trainer, self._earlier):
            self._earlier = trainer
        return report

    def _trainer_logprobs(self, policy: Policy, routes: list[NDArray[Any] | None]) -> list[list[float]]:
        given = zip(self._sequences, routes, strict=True)
        sequences = [TokenSequence(tokens, 1, i, experts) for i, (tokens, experts) in enumerate(given)]
        own = sequences[policy.dp_rank :: policy.dp_size]
        batches = pack(own, sum(map(len, self._sequences)), policy.pad_multiple)
        found: dict[int, list[float]] = {}
        for batch, logprobs in zip(batches, policy.logprobs(batches), strict=True):
            for row, index in enumerate(batch.indices):
                found[index] = logprobs[row][batch.mask[row]].tolist()
        by_index = {index: row for part in policy.ranks.gather(found) for index, row in part.items()}
        return [by_index[index] for index in range(len(sequences))]
