"""Sampling, speculation, the engine, and what idle ranks do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from specrl.config.base import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section
from specrl.config.methods import METHODS, DraftMethod, check_method

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


class SpeculationConfig(Section):
    """Where drafts come from and how long they are. No draft changes a token, only the time."""

    method: Annotated[str, AfterValidator(check_method)] = "eagle3"
    """A row of the table in `specrl/config/methods.py`. `mtp` drafts with the multi-token-prediction layer of a policy
    that has one."""
    k: NonNegativeInt = 3
    """The longest draft of a drafter, in tokens per iteration; 0 only with `method = "none"`."""
    adaptive: bool = True
    """Whether the controller chooses how far to draft for each running batch size, 0 included; otherwise always `k`."""
    replay_k: PositiveInt = 16
    """The longest draft from text, in tokens per iteration, for the methods that draft from text."""
    recent_tokens: NonNegativeInt = 100_000
    """How many tokens of an engine's latest rollouts, to whatever prompts, are kept to draft from where no stored text
    of the prompt serves better, for the methods with replay. Each takes at most some 400 bytes of memory; 0 keeps none.
    """
    draft_model: Path | None = None
    """The Hugging Face directory of a smaller model with the policy's vocabulary, for `method = "draft_model"`."""

    @property
    def draft_method(self) -> DraftMethod:
        """The method's row: what it drafts from and what it needs."""
        return METHODS[self.method]

    @property
    def draft_lengths(self) -> tuple[int, int]:
        """The longest draft of vLLM's proposer and the longest from text, in tokens; 0 for what the method lacks."""
        method = self.draft_method
        return self.k if method.vllm is not None else 0, self.replay_k if method.texts else 0

    @model_validator(mode="after")
    def _options_match_method(self) -> Self:
        if self.draft_method.drafts == (self.k == 0):
            raise ValueError(f'speculation.k = {self.k} with method = "{self.method}": 0 with "none", above 0 else')
        if (self.draft_method.model == "draft_model") != (self.draft_model is not None):
            given = "is not set" if self.draft_model is None else f"= {self.draft_model}"
            raise ValueError(
                f'speculation.draft_model {given} with method = "{self.method}": '
                'a model directory with "draft_model", not set else'
            )
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
    verify_every: PositiveInt = 20
    """Refits from one exact comparison of the engine's policy with the trainer's, tensor by tensor, to the next; the
    first refit of every job has one. It is left out with `tensor_parallel` above 1 and with native FP8."""


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
