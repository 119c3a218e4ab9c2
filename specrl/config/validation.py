"""Configuration of validation: the held-out sets, when they are answered, and the measurements on the final policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from specrl.config.base import Adjustable, Fraction, NonNegativeInt, PositiveInt, Section
from specrl.config.model import GeneratorConfig
from specrl.config.rollout import MAX_TEMPERATURE, MIN_TEMPERATURE

HELD_OUT = "held-out"
"""The name of the only set where `validate.sets` gives none."""
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class ValidationSetConfig(Section):
    """A held-out set: its problems, and how they are answered. By default it is the held-out share of `[data]`."""

    path: Path | None = None
    """A JSONL or Parquet file of problems, with the columns of `[data]`."""
    generators: tuple[GeneratorConfig, ...] = ()
    """Generators of problems. Those whose text `data.validation_fraction` holds out are taken, which training never
    sees, whichever generator draws them."""
    num_prompts: PositiveInt | None = None
    """Number of distinct problems, the first ones; by default all of a file, or else `validate.num_prompts`."""
    samples_per_prompt: PositiveInt = 1
    """Number of responses to each prompt: the k of avg@k and pass@k."""
    temperature: float | None = None
    """The temperature: 0 for greedy decoding, or from 0.01 to 2; by default `sampling.temperature`."""
    top_p: Fraction | None = None
    """As `sampling.top_p`, which it is by default."""
    reward: str | None = None
    """As `data.reward`, which it is by default."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.path is not None and self.generators:
            raise ValueError(f"path = {self.path} and generators: a set has one or the other")
        if self.temperature and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature = {self.temperature:g}: it must be 0 (greedy), or from {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}"
            )
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt} with temperature = 0: greedy responses to one prompt "
                "are all the same; set it to 1, or the temperature above 0"
            )
        return self


class ValidateConfig(Section):
    """Validation while the policy is trained, and the size of the measurements on the final policy and drafter."""

    every: Adjustable[NonNegativeInt] = 0
    """Number of RL steps from one validation to the next, during training. The policy is also validated before the
    first step and after the last one. With 0 there is no validation during training."""
    sets: Adjustable[dict[SetName, ValidationSetConfig]] = Field(default_factory=dict)
    """The held-out sets by name. The first is the one whose accuracy is reported as the run's. By default there is one,
    `held-out`, of `num_prompts` prompts with one response each."""
    correct_reward: Adjustable[float] = 1.0
    """The reward from which on a response counts as right for avg@k and pass@k."""
    num_prompts: Adjustable[PositiveInt] = 128
    """Number of prompts of a held-out set that gives no number of its own."""
    speed_batches: tuple[PositiveInt, ...] = (1, 4, 16)
    """Batch sizes at which plain and speculative generation are timed."""
    speed_prompts: PositiveInt = 16
    """Number of held-out prompts of each timed pair, raised to the batch size where that is larger."""
    speed_repeats: PositiveInt = 3
    """Number of interleaved plain/speculative pairs per batch size; the median of their ratios is
    reported."""
    exactness_prompts: PositiveInt = 16
    """Number of held-out prompts answered with and without speculation, sampled and greedy, and compared token by
    token."""
    exactness_samples: PositiveInt = 128
    """Number of speculative samples of the first tokens of each of two held-out prompts, for the chi-squared test."""

    @property
    def held_out_sets(self) -> dict[str, ValidationSetConfig]:
        """The sets by name: those of `sets`, or else the one called `held-out`."""
        return self.sets or {HELD_OUT: ValidationSetConfig()}

    @property
    def first_set(self) -> str:
        """The name of the set whose accuracy is reported as the run's."""
        return next(iter(self.held_out_sets))
