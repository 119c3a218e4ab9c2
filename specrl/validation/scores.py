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
        ci=intervals(of_prompts),
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


def intervals(of_prompts: dict[str, Floats]) -> dict[str, Interval]:
    """The confidence interval of each mean over prompts, the sampling unit since responses to a prompt are dependent.

    If every prompt's value is 0 or 1, it is Wilson's interval, which does not vanish when all are equal; otherwise it
    is the bootstrap's, with a fixed seed.
    """
    bootstrapped = bootstrap({name: values for name, values in of_prompts.items() if not is_binary(values)})
    return {
        name: bootstrapped[name] if name in bootstrapped else wilson(int(values.sum()), len(values))
        for name, values in of_prompts.items()
    }


def is_binary(values: Floats) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def wilson(num_right: int, num_prompts: int) -> Interval:
    from scipy.stats import binomtest

    interval = binomtest(num_right, num_prompts).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap(of_prompts: dict[str, Floats]) -> dict[str, Interval]:
    if not of_prompts:
        return {}
    values = np.stack(list(of_prompts.values()))
    generator, count = np.random.default_rng(0), values.shape[1]
    means = np.stack([values[:, generator.integers(count, size=count)].mean(axis=1) for _ in range(RESAMPLES)])
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return {name: (float(low[index]), float(high[index])) for index, name in enumerate(of_prompts)}
