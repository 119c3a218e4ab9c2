"""The probe of the policy after every refit: the engine's log-probs must be the trainer's."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from specrl.config import Config, PrecisionConfig
from specrl.distributed import Ranks
from specrl.rollout.engine import Engine
from specrl.rollout.refit.parity import ParityReport, check_moved_on, check_policy
from specrl.rollout.requests import SequenceScore
from specrl.rollout.vllm.weights.comparison import Held
from specrl.schemas import read_rollouts
from specrl.training.batches import TokenSequence, pack
from specrl.training.megatron.policy import Policy

logger = logging.getLogger(__name__)
NUM_SEQUENCES = 4
"""The most sequences of the probe."""
MAX_TOKENS = 32
"""The longest of them, in tokens. The weights are compared apart from them: what the log-probs show is that engine and
trainer compute the same with these weights."""
MAX_TOKENS_ALONE = 64
"""The longest of them where the weights cannot be compared, and the log-probs have to show that they arrived, too."""


def probe_sequences(rollouts_dir: Path, longest: int) -> list[list[int]]:
    """Return the ends of a few of the policy's own responses with their prompts, one for each prompt.

    Args:
        longest: The largest number of tokens of each. The end is what differs most: prompts may all begin alike.
    """
    first = sorted(rollouts_dir.glob("step=*/rank-*.arrow"))[0]
    rollouts = {tuple(rollout.prompt_tokens): rollout for rollout in reversed(read_rollouts(first))}
    chosen = list(reversed(rollouts.values()))[:NUM_SEQUENCES]
    return [[*rollout.prompt_tokens, *rollout.response_tokens][-longest:] for rollout in chosen]


def expected_difference(config: PrecisionConfig) -> float:
    """Return by how much `precision.max_kl` raises mean |log p_engine - log p_trainer|, in nats; 0 in equal precision.

    If log-ratios are normal with a variance of s^2, the KL divergence is s^2 / 2 and their mean magnitude is below s.
    """
    same = config.generation == config.training and config.kv_cache == "bf16"
    return 0.0 if same else math.sqrt(2 * config.max_kl)


def from_first(routes: list[NDArray[Any] | None]) -> list[NDArray[Any] | None]:
    """Return the routes that the first rank has (collective).

    Ranks that share a policy must send a token to the same experts, and may have engines of their own.
    """
    values = [routes]
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    return values[0]


class RefitProbe:
    """Compares engine and trainer on a few sequences (invariant 4); the drafter has a guard of its own."""

    def __init__(self, sequences: list[list[int]], config: Config) -> None:
        self._sequences = sequences
        self._engine_size = config.engine.tensor_parallel
        self._tolerance = config.engine.parity_tolerance + expected_difference(config.precision)
        self._earlier: list[list[float]] | None = None
        """The trainer's log-probs under the last policy that the engine was shown to hold, at first any."""

    def check(self, engine: Engine, policy: Policy, held: Held) -> ParityReport:
        """Compare log-probs of every probe token after the first; collective over the ranks.

        The data-parallel ranks hold the same policy, and each computes the trainer's log-probs of some sequences. A
        policy with experts sends the probe's tokens to the engine's experts.

        Args:
            held: The policy in this rank's part of the engine.

        Raises:
            PolicyParityError: Log-probs differ on average by more than `engine.parity_tolerance` and
                `expected_difference` allow, or are still those of an earlier policy.
        """
        scores = self._engine_scores(engine, policy.ranks, held, may_share=policy.routing is None)
        found = [score.logprobs for score in scores]
        routes = [score.routes for score in scores]
        trainer = self._trainer_logprobs(policy, routes if policy.routing is None else from_first(routes))
        report = check_policy(found, trainer, self._tolerance)
        if self._earlier is None or check_moved_on(found, trainer, self._earlier):
            self._earlier = trainer
        return report

    def _engine_scores(self, engine: Engine, ranks: Ranks, held: Held, *, may_share: bool) -> list[SequenceScore]:
        """Return the scores of every sequence by this rank's engine (collective).

        Engines that hold the same weights compute the same. So where all fingerprints are equal, each engine computes
        some of the sequences, at least one, and takes the scores of the others from those that computed them.

        Args:
            may_share: Whether to do so; otherwise every engine computes all. Fingerprints leave experts out.
        """
        number, engines = ranks.rank // self._engine_size, ranks.world_size // self._engine_size
        if engines == 1 or not may_share or not self._are_equal(ranks.gather(held.fingerprint())):
            return engine.score(self._sequences)
        count = len(self._sequences)
        own = [index for index in range(count) if index % engines == number % count]
        scores = dict(zip(own, engine.score([self._sequences[index] for index in own]), strict=True))
        sent = scores if number < count and engine.is_first else {}
        gathered = {index: score for part in ranks.gather(sent) for index, score in part.items()}
        return [scores.get(index, gathered[index]) for index in range(count)]

    def _are_equal(self, fingerprints: list[str]) -> bool:
        equal = fingerprints == fingerprints[: self._engine_size] * (len(fingerprints) // self._engine_size)
        if not equal:
            logger.info("the engines' fingerprints differ: each is compared with the trainer on the whole probe")
        return equal

    def _trainer_logprobs(self, policy: Policy, routes: list[NDArray[Any] | None]) -> list[list[float]]:
        """Return the trainer's log-probs of every sequence, on all ranks (collective).

        Args:
            routes: The engine's experts for each sequence, the same on all ranks.
        """
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
