"""Configuration of validation: the held-out sets, when they are answered, and the measurements on the final policy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Self

from pydantic import Field, model_validator

from specrl.config.base import Adjustable, Fraction, NonNegativeInt, PositiveInt, Section
from specrl.config.model import GeneratorConfig, Rewards
from specrl.config.rollout import MAX_TEMPERATURE, MIN_TEMPERATURE
from specrl.config.text import NAME, Places
from specrl.metrics import METRICS, VALIDATION, find_metric

HELD_OUT = "held-out"
"""The name of the only set if `validate.sets` is empty."""
SetName = Annotated[str, Field(pattern=NAME)]


WATCHED = ("validation", "reward", "rollout", "policy", "drafter", "spec", "mismatch")
"""The groups of metrics that `train.stop_when` may watch: results, not times."""


def suggest_metric(metric: str, names: Iterable[str] = ()) -> str:
    """The end of a message about a wrong name: the closest metric that may be watched or is in `names`."""
    watched = [name for name in METRICS if name.partition("/")[0] in WATCHED and not name.endswith("_I")]
    near = get_close_matches(metric, [*watched, *names], n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""


class StopConfig(Section):
    """A reason to end training early: a metric, and one of three conditions on it."""

    metric: str
    """The name of a metric of the RL step, such as `reward/mean`, or of a held-out set, such as
    `validation/held-out/accuracy`; see `specrl/metrics.py`. Any `policy/NAME` is allowed if the loss does not declare
    which metrics it returns."""
    above: float | None = None
    """Training ends once the metric is above this."""
    below: float | None = None
    """Training ends once the metric is below this."""
    no_gain_for: PositiveInt | None = None
    """Training ends once this many measurements in a row (steps, or validations) were no better than the best one
    before them."""

    @model_validator(mode="after")
    def _is_one_condition(self) -> Self:
        given = [name for name in ("above", "below", "no_gain_for") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'no condition'} given: give one of above, below and no_gain_for")
        definition = find_metric(self.metric)
        if definition is None or self.metric.partition("/")[0] not in WATCHED:
            raise ValueError(
                f'metric = "{self.metric}": it must be a metric of the groups {", ".join(WATCHED)} that '
                f"specrl/metrics.py defines{suggest_metric(self.metric)}"
            )
        if self.no_gain_for is not None and definition.better is None:
            raise ValueError(
                f'metric = "{self.metric}" with no_gain_for: neither higher nor lower values of it are better; use '
                "above or below"
            )
        return self


class ValidationSetConfig(Section):
    """A held-out set: its problems, and how they are answered. By default it is the held-out share of `[data]`."""

    path: Places | None = None
    """Files of problems, as in `data.path`, with the columns of `[data]`."""
    generators: tuple[GeneratorConfig, ...] = ()
    """Generators of problems. Only problems whose text `data.validation_fraction` holds out are used, which training
    never sees, whichever generator draws them."""
    num_prompts: PositiveInt | None = None
    """Number of distinct problems, taken from the beginning; by default all of a file, or else
    `validate.num_prompts`."""
    samples_per_prompt: PositiveInt = 1
    """Number of responses to each prompt: the k of avg@k and pass@k."""
    temperature: float | None = None
    """The temperature: 0 for greedy decoding, or from 0.01 to 2; by default `sampling.temperature`."""
    top_p: Fraction | None = None
    """As `sampling.top_p`, whose value is the default."""
    reward: Rewards | None = None
    """As `data.reward`, whose value is the default; for instance one of its parts."""

    @property
    def has_problems(self) -> bool:
        """Whether the set has its own problems instead of the held-out part of `[data]`."""
        return self.path is not None or bool(self.generators)

    @property
    def pass_sizes(self) -> list[int]:
        """The k for which pass@k is reported: the powers of two up to `samples_per_prompt`, and that number itself."""
        k = self.samples_per_prompt
        return sorted({k, *(1 << power for power in range(k.bit_length()))})

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
    """Number of RL steps between validations during training. The policy is also validated before the first step and
    after the last one. With 0 there is no validation during training."""
    sets: Adjustable[dict[SetName, ValidationSetConfig]] = Field(default_factory=dict)
    """The held-out sets by name. The accuracy on the first is reported as the run's. By default there is one,
    `held-out`, with `num_prompts` prompts and one response each."""
    correct_reward: Adjustable[float] = 1.0
    """The lowest reward at which a response counts as right for avg@k and pass@k."""
    num_prompts: Adjustable[PositiveInt] = 128
    """Number of prompts of a held-out set that does not give its own number."""
    speed_batches: tuple[PositiveInt, ...] = (1, 16)
    """Batch sizes at which plain and speculative generation are timed."""
    speed_prompts: PositiveInt = 16
    """Number of requests of each timed pair, raised to the batch size if that is larger. They are the first of the
    training step that would come next: one for each of its prompts, and then further ones."""
    speed_repeats: PositiveInt = 3
    """Number of interleaved plain/speculative pairs per batch size; the median of their ratios is
    reported."""
    exactness_prompts: PositiveInt = 16
    """Number of held-out prompts answered with and without speculation, sampled and greedy, and compared token by
    token."""

    @property
    def held_out_sets(self) -> dict[str, ValidationSetConfig]:
        """The sets by name: those in `sets`, or else the one named `held-out`."""
        return self.sets or {HELD_OUT: ValidationSetConfig()}

    @property
    def first_set(self) -> str:
        """The name of the set whose accuracy is reported as the run's."""
        return next(iter(self.held_out_sets))

    def check_metric(self, key: str, metric: str, *, with_better: bool = False) -> None:
        """Check that validations measure the metric of `key` and, `with_better`, know which values are better."""
        if not self.every:
            raise ValueError(f'{key} = "{metric}": nothing is validated during training; set validate.every above 0')
        scores = [score for score, found in VALIDATION.items() if found.better is not None or not with_better]
        for name, chosen in self.held_out_sets.items():
            own = [score.replace("_I", f"_{size}") for score in scores for size in chosen.pass_sizes]
            if metric in {f"validation/{name}/{score}" for score in own}:
                return
        raise ValueError(
            f'{key} = "{metric}": it must be validation/SET/SCORE, where SET is {" or ".join(self.held_out_sets)}, and '
            f"SCORE one of {', '.join(scores)}, with an I up to the set's samples_per_prompt"
        )
