"""Sampling, speculation, the engine, and what idle ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from specrl.config.base import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section

CANNOT_BE_HONOURED = {
    "min_p": "vLLM leaves it out where it verifies drafts; use top_p",
    "logit_bias": "vLLM leaves it out where it verifies drafts",
    "logits_processors": "vLLM refuses custom processors together with speculation",
    "repetition_penalty": "a token's probability must depend on policy, seed and position alone",
    "presence_penalty": "a token's probability must depend on policy, seed and position alone",
    "frequency_penalty": "a token's probability must depend on policy, seed and position alone",
    "seed": "every response has a seed of its own, made from the run's `seed`",
}
"""Sampling settings known from elsewhere, and why exact speculation has no place for them."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 means greedy."""
    top_p: Fraction = 1.0
    top_k: NonNegativeInt = 0
    """0 means all tokens."""
    max_response_tokens: PositiveInt = 160

    @model_validator(mode="before")
    @classmethod
    def _can_be_honoured(cls, data: Any) -> Any:
        for name in CANNOT_BE_HONOURED.keys() & data if isinstance(data, dict) else ():
            raise ValueError(f"sampling.{name} = {data[name]} cannot be honoured: {CANNOT_BE_HONOURED[name]}")
        return data


WITH_MODEL = frozenset({"eagle3", "eagle3+replay", "mtp", "draft_model"})
"""Methods whose drafts come from a model's distribution."""


class SpeculationConfig(Section):
    """Where drafts come from and how long they are; no draft changes a token, only the time."""

    method: Literal["none", "eagle3", "mtp", "ngram", "draft_model", "replay", "eagle3+replay"] = "eagle3"
    """`mtp` drafts with the multi-token-prediction layer of a policy that has one."""
    k: NonNegativeInt = 3
    """Longest draft of a drafter, tokens per iteration; 0 only with `method = "none"`."""
    adaptive: bool = True
    """The controller chooses how far to draft for each running batch size, 0 included; false: always `k`."""
    replay_k: PositiveInt = 16
    """Longest draft from stored text, tokens per iteration; for the methods with replay."""
    recent_tokens: NonNegativeInt = 100_000
    """Tokens of an engine's latest rollouts, to whatever prompts, that drafts are looked up in where no stored text of
    the prompt serves better; for the methods with replay. At most some 400 bytes of memory each; 0: none."""
    draft_model: Path | None = None
    """Hugging Face directory of a smaller model with the policy's vocabulary, for `method = "draft_model"`."""
    drafts: Literal["likely", "coupled"] = "likely"
    """What a drafter proposes: its likeliest token, or one drawn from its distribution with the random number that the
    policy's token will be drawn with. The second is accepted more often where a good drafter faces an undecided policy;
    compare `drafter/overlap_pos_*` with `drafter/expected_acceptance_pos_*`."""

    @model_validator(mode="after")
    def _options_match_method(self) -> Self:
        if (self.method == "none") != (self.k == 0):
            raise ValueError(f'speculation.k = {self.k} with method = "{self.method}": 0 with "none", above 0 else')
        if (self.method == "draft_model") != (self.draft_model is not None):
            given = "is not set" if self.draft_model is None else f"= {self.draft_model}"
            raise ValueError(
                f'speculation.draft_model {given} with method = "{self.method}": '
                'a model directory with "draft_model", not set else'
            )
        if self.drafts == "coupled" and self.method not in WITH_MODEL:
            allowed = ", ".join(sorted(WITH_MODEL))
            raise ValueError(f'speculation.drafts = "coupled" with method = "{self.method}": it needs one of {allowed}')
        return self


class EngineConfig(Section):
    """The vLLM engine of one rank."""

    tensor_parallel: PositiveInt = 1
    max_num_seqs: PositiveInt = 64
    """Most requests that run at once on one engine."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache on CPU, GiB; a GPU uses `gpu_memory_fraction`."""
    gpu_memory_fraction: Fraction = 0.45
    """Share of GPU memory for engine weights and KV cache; the rest is the trainer's. With `sleep` all of it is."""
    sleep: bool = False
    """On GPUs: while ranks train, the engine's weights lie in host memory and its KV cache is given up. The trainer
    then has the whole GPU, and `gpu_memory_fraction` can be larger; a step copies the weights there and back."""
    compile: bool = False
    """torch.compile the engine: slower start, faster steps."""
    parity_tolerance: PositiveFloat = 0.15
    """Largest mean |log-prob(engine) - log-prob(trainer)| in nats that the parity probe accepts after a refit."""


REPLAYING = frozenset({"replay", "eagle3+replay"})
"""Methods that draft from stored text."""
WITH_DRAFTER = frozenset({"eagle3", "eagle3+replay", "mtp"})
"""Methods with a drafter of its own weights, which training improves."""


BubbleUse = Literal["none", "pregenerate", "train_drafter", "both"]


class BubblesConfig(Section):
    """What a rank does from the end of its own share of a step's rollouts to the end of the slowest rank's."""

    use: BubbleUse = "none"
    """`pregenerate`: responses to the next step's prompts, as drafts for it; `train_drafter`: updates of the drafter;
    `both` shares the time out by accepted tokens gained per second, and begins with pre-generation."""
    seeds: Literal["same", "other"] = "same"
    """Of pre-generated text: `same` as the rollout it stands for, which then mostly samples that very text (exact here,
    because no draft influences which token is picked), or `other` ones, as published."""

    @property
    def pregenerates(self) -> bool:
        return self.use in ("pregenerate", "both")

    @property
    def trains_drafter(self) -> bool:
        return self.use in ("train_drafter", "both")
