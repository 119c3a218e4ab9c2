"""What `specrl bench run` has measured, as figures: ratios, costs, and a paired test of the rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from specrl.bench.interleaved.side import TrainStep
from specrl.bench.run.training import UseRun
from specrl.bench.tables import Spread, ratios
from specrl.schemas import Rollout, read_folder

FLIPS = 10_000
"""The number of random sign patterns of the paired test."""
ResponseKey = tuple[int, int, int]
"""The step, the prompt and the number of the response among those to it."""


def read_responses(rollouts_dir: Path) -> dict[ResponseKey, Rollout]:
    """Return all responses of a training."""
    return {(rollout.step, rollout.prompt_id, rollout.sample): rollout for rollout in read_folder(rollouts_dir)}


@dataclass(frozen=True)
class Comparison:
    """The training of one use beside that of plain decoding, whose steps were taken in the same rounds."""

    run: UseRun
    plain: UseRun
    warm_up: int
    """The number of first steps whose times do not count."""
    responses: Mapping[ResponseKey, Rollout]
    plain_responses: Mapping[ResponseKey, Rollout]

    @property
    def generation(self) -> Spread:
        """How many times as fast generation is, per token, step by step."""
        return self._ratios(lambda step: step.seconds("generation"))

    @property
    def step(self) -> Spread:
        """How many times as fast a whole step is, per token, step by step; without validations."""
        return self._ratios(lambda step: step.seconds("step") - step.seconds("validation"))

    @property
    def end_to_end(self) -> float:
        """How many times as fast the whole training is, per token, with its start and all of its steps."""
        return (self.plain.end_to_end_s / self.plain.tokens) / (self.run.end_to_end_s / self.run.tokens)

    @property
    def tokens_equal(self) -> bool:
        """Whether every response has the same tokens as that of plain decoding."""
        return self.num_same == len(self.plain_responses) == len(self.responses)

    @property
    def num_same(self) -> int:
        """The number of responses with the same tokens as those of plain decoding."""
        return sum(
            key in self.responses and self.responses[key].response_tokens == plain.response_tokens
            for key, plain in self.plain_responses.items()
        )

    def per_million_tokens(self, value: Callable[[TrainStep], float]) -> float:
        """Return what the counted steps cost for a million response tokens, each of which the policy has accepted."""
        steps = self.run.steps[self.warm_up :]
        return 1e6 * sum(map(value, steps)) / sum(step.tokens for step in steps)

    @property
    def reserved_hours(self) -> float:
        """The hours of the cores (or, where ranks have one, of the GPUs) that are held, for a million tokens."""
        resources = self.run.context.config.resources_of("train")
        held = resources.ranks * (resources.gpus_per_rank or resources.cpus_per_rank)
        return held * self.per_million_tokens(lambda step: step.seconds("step") - step.seconds("validation")) / 3600

    @property
    def busy_hours(self) -> float:
        """The hours of CPU time that the ranks use, for a million tokens."""
        return self.per_million_tokens(lambda step: step.cpu_s) / 3600

    @property
    def joules_per_token(self) -> float | None:
        """The energy of the machine for a token; None where it has no counter."""
        joules = self.run.joules[self.warm_up :]
        return sum(joules) / sum(step.tokens for step in self.run.steps[self.warm_up :]) if joules else None

    @property
    def reward(self) -> PairedTest:
        """The mean reward of a prompt's responses against that with plain decoding, over all prompts of all steps."""
        own, plain = _by_prompt(self.responses), _by_prompt(self.plain_responses)
        return paired_test([own[key] - plain[key] for key in plain])

    def row(self) -> dict[str, Any]:
        """Return the figures as a row for `--json`."""
        step = self.step
        return {
            "use": self.run.name,
            "precision": self.run.precision,
            "generation_ratio": self.generation.median,
            "step_ratio": step.median,
            "end_to_end_ratio": self.end_to_end,
            "ratio_min": step.least,
            "ratio_max": step.greatest,
            "tokens_equal": self.tokens_equal,
            "same_responses": self.num_same / len(self.plain_responses),
            "reward_mean": fmean(rollout.reward for rollout in self.responses.values()),
            "reward_difference": self.reward.difference,
            "reward_p_value": self.reward.p_value,
            "reserved_hours_per_million_tokens": self.reserved_hours,
            "cpu_hours_per_million_tokens": self.busy_hours,
            "joules_per_token": self.joules_per_token,
        }

    def _ratios(self, seconds: Callable[[TrainStep], float]) -> Spread:
        own, plain = (
            [seconds(step) / step.tokens for step in run.steps[self.warm_up :]] for run in (self.run, self.plain)
        )
        return ratios(plain, own)


@dataclass(frozen=True)
class PairedTest:
    """A two-sided test by random signs of whether paired differences have a mean other than 0."""

    difference: float
    """The mean difference."""
    p_value: float
    """The share of sign patterns whose mean is at least as far from 0; 1 where no pair differs."""
    num_pairs: int
    num_different: int
    """The number of pairs that differ."""


def paired_test(differences: Sequence[float]) -> PairedTest:
    """Test paired differences. Pairs without a difference say nothing about its sign and change no mean."""
    different = np.array([value for value in differences if value])
    mean = float(np.sum(different) / max(1, len(differences)))
    if not len(different):
        return PairedTest(0.0, 1.0, len(differences), 0)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (FLIPS, len(different)))
    as_far = np.abs(signs @ different) >= abs(different.sum()) - 1e-9
    return PairedTest(mean, float((as_far.sum() + 1) / (FLIPS + 1)), len(differences), len(different))


def _by_prompt(responses: Mapping[ResponseKey, Rollout]) -> dict[tuple[int, int], float]:
    """Return the mean reward of the responses to each prompt of each step."""
    groups: dict[tuple[int, int], list[float]] = {}
    for (step, prompt, _), rollout in responses.items():
        groups.setdefault((step, prompt), []).append(rollout.reward)
    return {key: fmean(rewards) for key, rewards in groups.items()}
