"""The probe of the policy after every refit: the engine's log-probs must be the trainer's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrl.config import Config, PrecisionConfig
from specrl.rollout.engine import Engine
from specrl.rollout.errors import PolicyParityError
from specrl.schemas import read_rollouts
from specrl.training.batches import TokenSequence, pack
from specrl.training.megatron.policy import Policy

NUM_SEQUENCES = 4
MAX_TOKENS = 64
"""The longest sequence."""
DECIDED = 0.75
"""The share of tokens that must be nearer to one of two policies for that to be the engine's; 0.5 is chance."""


def check_policy(
    engine_logprobs: Sequence[Sequence[float]], trainer_logprobs: Sequence[Sequence[float]], tolerance: float
) -> dict[str, float]:
    """Compare log-probs of the same sequences; the mean absolute difference must stay within `tolerance` nats.

    Returns the mean and the maximum, under their names in MLflow.
    """
    assert list(map(len, engine_logprobs)) == list(map(len, trainer_logprobs)), "not of the same sequences"
    assert any(engine_logprobs), "no tokens"
    differences = np.abs(np.concatenate(engine_logprobs) - np.concatenate(trainer_logprobs))
    differences[~np.isfinite(differences)] = np.inf
    mean, maximum = float(differences.mean()), float(differences.max())
    if not mean <= tolerance:
        raise PolicyParityError(
            f"engine and trainer disagree after the refit: mean |difference| of log-probs {mean:.4f} nats, maximum "
            f"{maximum:.4f}, over {len(differences)} tokens; the mean may be at most {tolerance:g} "
            "(engine.parity_tolerance, and what the calibration of FP8 allows where precisions differ)"
        )
    return {"refit/mean_abs_logprob_diff": mean, "refit/max_abs_logprob_diff": maximum}


def check_moved_on(
    engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]], earlier: Sequence[Sequence[float]]
) -> bool:
    """Whether the engine's log-probs are certainly those of the trainer's current policy, not of its `earlier` one.

    Weights that silently stay the same pass the other checks while the policy moves less than their tolerances, as do
    an earlier step's weights sent by the trainer. Rounding moves some tokens by more than a step does, so the two
    policies must be well apart, and most tokens must agree on which of them the engine holds.
    """
    held, new, old = (np.concatenate(logprobs) for logprobs in (engine, trainer, earlier))
    to_new, to_old = np.abs(held - new), np.abs(held - old)
    if np.abs(new - old).mean() <= 2 * min(to_new.mean(), to_old.mean()):
        return False
    apart = to_old != to_new
    share = (to_old < to_new)[apart].mean() if apart.any() else 0.5
    if to_old.mean() < to_new.mean() and share > DECIDED:
        raise PolicyParityError(
            f"the engine still computes with an earlier policy: on average its log-probs are {to_old.mean():.2g} nats "
            f"from that policy's and {to_new.mean():.2g} from the trainer's; {share:.0%} of tokens are nearer to the "
            "earlier one"
        )
    return bool(to_new.mean() < to_old.mean() and share < 1 - DECIDED)


def probe_sequences(rollouts_dir: Path, longest: int) -> list[list[int]]:
    """Read a few of the policy's own responses with their prompts, cut to the last `longest` tokens."""
    first = sorted(rollouts_dir.glob("step=*/rank-*.arrow"))[0]
    rollouts = {tuple(rollout.prompt_tokens): rollout for rollout in reversed(read_rollouts(first))}
    chosen = list(reversed(rollouts.values()))[:NUM_SEQUENCES]
    return [[*rollout.prompt_tokens, *rollout.response_tokens][-longest:] for rollout in chosen]


def expected_difference(config: PrecisionConfig) -> float:
    """How much mean |log p_engine - log p_trainer|, in nats, `precision.max_kl` allows; 0 in equal precision.

    If log-ratios are normal with variance s^2, the KL divergence is s^2 / 2 and their mean magnitude is below s.
    """
    same = config.generation == config.training and config.kv_cache == "bf16"
    return 0.0 if same else math.sqrt(2 * config.max_kl)


class RefitProbe:
    """Compares engine and trainer on a few sequences (invariant 4); `DrafterGuard` does so for the drafter."""

    def __init__(self, sequences: list[list[int]], config: Config) -> None:
        self._sequences = sequences
        self._tolerance = config.engine.parity_tolerance + expected_difference(config.precision)
        self._earlier: list[list[float]] | None = None
        """The trainer's log-probs under the last policy that the engine was shown to hold, at first any."""

    def check(self, engine: Engine, policy: Policy) -> dict[str, float]:
        """Compare the log-probs of engine and trainer; return what `check_policy` does (collective).

        Raises:
            PolicyParityError: They differ on average by more than `engine.parity_tolerance` and `expected_difference`
                allow, or are still those of an earlier policy.
        """
        found, routes = engine.score(self._sequences)
        if policy.routing is not None:
            # Ranks that share a policy must route a token to the same experts, but their engines may choose others.
            routes = policy.ranks.gather(routes if policy.ranks.is_first else [])[0]
        trainer = self._trainer_logprobs(policy, routes)
        differences = check_policy(found, trainer, self._tolerance)
        if self._earlier is None or check_moved_on(found, trainer, self._earlier):
            self._earlier = trainer
        return differences

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
