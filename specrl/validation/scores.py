"""The scores of a policy on a held-out set: accuracy, avg@k and pass@k, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrl.artifacts import SetScore

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float]

CONFIDENCE = 0.95
RESAMPLES = 1000


@dataclass(frozen=True)
class SetResponses:
    """A set's responses, each field an array [prompts, samples]."""

    rewards: Floats
    lengths: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]  # whether it was cut off at the limit


def score_set(
    step: int,
    name: str,
    responses: SetResponses,
    sizes: Sequence[int],
    correct_reward: float,
    seconds: float,
    decode_steps_per_token: float,
    measure: str = "",
) -> SetScore:
    """The scores of the policy after `step` steps, with pass@size for `sizes`."""
    num_prompts, k = responses.rewards.shape
    right = responses.rewards >= correct_reward
    passed = {size: pass_at(right.sum(axis=1), k, size) for size in sizes}
    of_prompts = {"accuracy": responses.rewards.mean(axis=1), "avg_at_k": right.mean(axis=1), "pass_at_k": passed[k]}
    return SetScore(
        step=step,
        set=name,
        num_prompts=num_prompts,
        k=k,
        accuracy=float(responses.rewards.mean()),
        prompt_accuracies=tuple(of_prompts["accuracy"].tolist()),
        avg_at_k=float(right.mean()),
        pass_at_k=float(passed[k].mean()),
        pass_at={size: float(values.mean()) for size, values in passed.items()},
        ci={kind: interval(values) for kind, values in of_prompts.items()},
        response_length_mean=float(responses.lengths.mean()),
        response_length_max=int(responses.lengths.max()),
        truncated_fraction=float(responses.truncated.mean()),
        seconds=seconds,
        decode_steps_per_token=decode_steps_per_token,
        measure=measure,
    )


def pass_at(num_right: npt.NDArray[np.int64], num_samples: int, size: int) -> Floats:
    """The probability, [prompts], that at least one of `size` samples of a prompt is right.

    It is the unbiased estimator 1 - C(n - c, size) / C(n, size) of Chen et al., 2021 (arXiv:2107.03374).
    """
    total = math.comb(num_samples, size)
    return np.array([1 - math.comb(num_samples - int(right), size) / total for right in num_right])


def interval(values: Floats) -> Interval:
    """The confidence interval of a mean over prompts, the sampling unit since responses to a prompt are dependent.

    If every value is 0 or 1, it is Wilson's interval, which does not vanish when all are equal; otherwise it is the
    bootstrap's, with a fixed seed.
    """
    if np.isin(values, (0.0, 1.0)).all():
        from scipy.stats import binomtest

        found = binomtest(int(values.sum()), len(values)).proportion_ci(CONFIDENCE, method="wilson")
        return float(found.low), float(found.high)
    chosen = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[chosen].mean(axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
