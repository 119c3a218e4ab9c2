"""What a benchmark can be asked for: one small model per sub-command of `specrl bench`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, field_validator

from specrl.config import Config, ConfigError, PositiveInt, Section, SpeculationConfig
from specrl.config.base import NonNegativeInt
from specrl.config.methods import METHODS
from specrl.config.rollout import BubbleUse

ADAPTIVE = "adaptive"
TAIL = "tail64"
"""The long-tailed batch: 64 requests of natural length on one rank."""
TAIL_SIZE = 64


def _number_or(word: str) -> AfterValidator:
    """A positive number, which may come as text, or the word."""

    def check(value: int | str) -> int | str:
        if value == word or (str(value).isdigit() and int(value) > 0):
            return value if value == word else int(value)
        raise ValueError(f"{value!r} is neither a positive number nor {word}")

    return AfterValidator(check)


K = Annotated[int | str, _number_or(ADAPTIVE)]
Batch = Annotated[int | str, _number_or(TAIL)]


class RolloutSettings(Section):
    """`specrl bench rollouts`."""

    methods: tuple[str, ...] = ()
    """Draft sources; none given: all that the run's drafter allows."""
    ks: tuple[K, ...] = (1, 3, 5, ADAPTIVE)
    batches: tuple[Batch, ...] = (1, 2, 4, 8, 16, 32, TAIL)
    repeats: PositiveInt = 5
    """Rounds; each runs every side once."""
    max_tokens: PositiveInt = 32
    """Longest response at a fixed batch size; the long-tailed batch goes to the run's own limit."""
    compile: bool = True
    """Also start compiled engines, plain and with EAGLE-3, and take the faster."""

    @field_validator("methods")
    @classmethod
    def _known(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        allowed = [
            name for name, row in METHODS.items() if row.drafts
        ]  # plain decoding is the other side of every pair
        if unknown := [method for method in methods if method not in allowed]:
            raise ValueError(f"{unknown[0]!r} is not one of {', '.join(allowed)}")
        return methods

    @field_validator("ks", "batches")
    @classmethod
    def _not_empty(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        if not values:
            raise ValueError("name at least one")
        return values


def methods_of(settings: RolloutSettings, config: Config) -> tuple[str, ...]:
    """The draft sources to measure on a run.

    Raises:
        ConfigError: one needs a drafter that the run does not have.
    """
    own = config.speculation.draft_method
    drafting = [row for row in METHODS.values() if row.drafts]
    allowed = tuple(row.name for row in drafting if row.model is None or row.same_model(own))
    for method in settings.methods:
        if method not in allowed:
            raise ConfigError(f"methods: {method} needs a run that was made for it; this one's: {', '.join(allowed)}")
    return settings.methods or allowed


def speculation_of(run: SpeculationConfig, method: str, k: int) -> SpeculationConfig:
    """The run's speculation with another draft source and longest draft."""
    draft_model = run.draft_model if METHODS[method].model == "draft_model" else None
    changed = {"method": method, "k": k, "draft_model": draft_model}
    return SpeculationConfig.model_validate(run.model_dump() | changed)


class DrafterSettings(Section):
    """`specrl bench drafter`."""

    num_steps: PositiveInt = 10
    """RL steps."""
    prompts_per_step: PositiveInt = 8
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    num_prompts: PositiveInt = 96
    """Prompts answered to pretrain each of the two drafters."""
    epochs: PositiveInt = 6
    """Of the pretraining."""
    batches: tuple[PositiveInt, ...] = (1, 4)
    """Batch sizes of the matched pairs at the end."""
    repeats: PositiveInt = 3


class BubbleSettings(Section):
    """`specrl bench bubbles`."""

    uses: Annotated[tuple[BubbleUse | Literal["recent"], ...], Field(min_length=1)] = get_args(BubbleUse)
    """Beside plain decoding, which all are compared with; `recent`: none, and no drafts but from recent rollouts."""
    drafter: Path | None = None
    """Directory of an EAGLE-3 drafter to begin with; the run's own, before RL, by default."""
    num_steps: Annotated[int, Field(ge=2)] = 12
    """RL steps of each setting."""
    ranks: Annotated[int, Field(ge=2)] = 2
    """On this machine."""
    threads: PositiveInt = 1
    """Of a rank."""
    seeds: Literal["same", "other"] = "same"
    """Of pre-generated text, as `bubbles.seeds`."""
    prompts_per_step: PositiveInt | None = None
    """The run's own by default; so is the next."""
    samples_per_prompt: Annotated[int, Field(ge=2)] | None = None
    max_response_tokens: PositiveInt | None = None
    """Longest response; the run's own by default. Where every rank has a response that is cut off there, none waits."""


class AgreementSettings(Section):
    """`specrl bench agreement`."""

    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (1, 2, 3)
    """Of the sampling."""
    num_prompts: PositiveInt = 64
    """Held-out prompts."""
    samples_per_prompt: PositiveInt = 4


class PrecisionSettings(Section):
    """`specrl bench precision`."""

    num_steps: Annotated[int, Field(ge=2)] = 10
    """RL steps of each setting and seed."""
    seeds: tuple[NonNegativeInt, ...] = (1, 2, 3)
    """Of prompts and sampling; the policy before RL is the run's own."""
    correction: Literal["tis", "icepop", "seq-mask"] = "tis"
    """Of the setting with one; the others have none."""
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    """Of the engines with FP8 weights."""
    prompts_per_step: PositiveInt = 8
    """This and the next are small, for twelve runs on two cores."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    num_prompts: PositiveInt = 64
    """Held-out prompts for the accuracy."""
    threads: PositiveInt = 2
