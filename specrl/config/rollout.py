"""Configuration of sampling, speculation, the engine, and the use of idle time."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from specrl.config.base import Adjustable, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section
from specrl.config.methods import METHODS, DraftMethod, check_method
from specrl.config.text import UserPath

MIN_TEMPERATURE = 0.01
"""The lowest sampling temperature, to which vLLM raises lower ones."""
MAX_TEMPERATURE = 2.0
"""The highest temperature that vLLM accepts."""
ALONE_FRACTION = 0.86
"""The least fraction of a GPU's memory for an engine that shares the GPU with no trainer."""
MIN_BATCHED_TOKENS = 2048
"""The least number of tokens that an engine can compute in one forward pass: vLLM's in-process default."""


def _check_temperature(temperature: float) -> float:
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"sampling.temperature = {temperature:g}: it must be from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}; "
            "at 0, all responses to a prompt would be the same and nothing could be learned from their rewards"
        )
    return temperature


def _check_top_k(top_k: int) -> int:
    if top_k < 0 or top_k == 1:
        raise ValueError(
            f"sampling.top_k = {top_k}: it must be 0 (all tokens) or at least 2; with 1, all responses to a prompt "
            "would be the same and nothing could be learned from their rewards"
        )
    return top_k


class SamplingConfig(Section):
    """How responses are sampled.

    The trainer's log-probs refer to the whole distribution at this temperature, regardless of `top_p` and `top_k`; see
    `specrl/algorithms/objective.py`.
    """

    temperature: Adjustable[Annotated[float, AfterValidator(_check_temperature)]] = 1.0
    """The temperature by which logits are divided, from 0.01 to 2."""
    top_p: Adjustable[Fraction] = 1.0
    """Probability mass of the smallest set of most likely tokens that is sampled from; 1 keeps all tokens."""
    top_k: Adjustable[Annotated[int, AfterValidator(_check_top_k)]] = 0
    """Number of most likely tokens that are sampled from, at least 2; 0 keeps all tokens."""
    max_response_tokens: Adjustable[PositiveInt] = 160
    """The longest response, in tokens."""
    stop: Adjustable[tuple[Annotated[str, Field(min_length=1)], ...]] = ()
    """Strings after which a response ends, besides the model's own end tokens: the first token that completes one is
    its last, also within accepted drafts. They are matched against the text of the response, special tokens
    included."""


class SpeculationConfig(Section):
    """Where drafts come from and how long they are. They affect the duration of a rollout, but none of its tokens."""

    method: Adjustable[Annotated[str, AfterValidator(check_method)]] = "eagle3"
    """The source of drafts, the name of a row in `specrl/config/methods.py`. `mtp` drafts with the
    multi-token-prediction layer of a policy that has one."""
    k: Adjustable[NonNegativeInt] = 3
    """The longest draft of vLLM's proposer (drafter or n-gram lookup), in tokens per iteration. It is 0 only with
    `method = "none"`. Methods that draft only from text ignore it."""
    adaptive: Adjustable[bool] = True
    """Whether the engine chooses the draft length, from 0 up, for the running requests, from the tokens and seconds
    that it expects of an iteration; otherwise drafts always have full length."""
    replay_k: Adjustable[PositiveInt] = 16
    """The longest draft from text, in tokens per iteration, for the methods that draft from text."""
    recent_tokens: Adjustable[NonNegativeInt] = 100_000
    """How many tokens of an engine's latest rollouts, to any prompt, are kept to draft from if the text stored for the
    prompt is no better, for the methods with replay; as many again of finished responses in groups that are still being
    answered. Each token takes up to 750 bytes of memory while texts are indexed, and 70 after that; 0 keeps none."""
    draft_model: Adjustable[UserPath | None] = None
    """The Hugging Face directory of a smaller model with the policy's vocabulary, for the methods `draft_model` and
    `draft_model+replay`."""

    @property
    def draft_method(self) -> DraftMethod:
        return METHODS[self.method]

    @property
    def draft_lengths(self) -> tuple[int, int]:
        """The longest draft of vLLM's proposer and the longest from text, in tokens; 0 if the method has none."""
        method = self.draft_method
        return self.k if method.vllm is not None else 0, self.replay_k if method.replays else 0

    @model_validator(mode="after")
    def _options_match_method(self) -> Self:
        if self.draft_method.drafts == (self.k == 0):
            raise ValueError(
                f'speculation.k = {self.k} with method = "{self.method}": '
                'it must be 0 with "none" and above 0 with any other method'
            )
        if (self.draft_method.model == "draft_model") != (self.draft_model is not None):
            given = "is not set" if self.draft_model is None else f"= {self.draft_model}"
            raise ValueError(
                f'speculation.draft_model {given} with method = "{self.method}": '
                "it must be a model directory with draft_model and draft_model+replay, and not set with others"
            )
        return self


class EngineConfig(Section):
    """The vLLM engines, each of which spans `tensor_parallel` ranks."""

    tensor_parallel: Adjustable[PositiveInt] = 1
    """Number of ranks that share each layer of an engine."""
    max_num_seqs: Adjustable[Annotated[int, Field(gt=0, le=2048)]] = 64
    """Largest number of requests that run at once on one engine; at most 2048, the number of tokens that vLLM computes
    in one pass."""
    kv_cache_gib: Adjustable[PositiveFloat] = 1.0
    """Size of a rank's KV cache on a CPU, in GiB; on a GPU `gpu_memory_fraction` determines it."""
    gpu_memory_fraction: Adjustable[Fraction] = 0.45
    """Fraction of a GPU's memory for the engine's weights and KV cache while it shares the GPU with the trainer. The
    trainer has the rest or, with `sleep`, the whole GPU while the engine sleeps. Where the engine is alone (`pretrain`,
    `validate`, `export`), it takes 0.86 of the GPU, or this fraction if it is larger."""
    sleep: Adjustable[bool] = False
    """Whether the engine sleeps while ranks train, on GPUs: its weights move to host memory and its KV cache is freed.
    The trainer then has the whole GPU, so `gpu_memory_fraction` can be larger; each step copies the weights to the host
    and back."""
    compile: Adjustable[bool] = False
    """Whether the engine is compiled with torch.compile, which makes it start more slowly and decode faster."""
    batch_invariant: Adjustable[bool] = False
    """Whether the engine uses vLLM's batch-invariant kernels, with which the log-probs of a token do not depend on what
    else is in its batch; only on GPUs of compute capability 9.0 or later. This is slower, also for the trainer's
    collectives, because vLLM restricts NCCL to one channel in the same process."""
    parity_tolerance: Adjustable[PositiveFloat] = 0.15
    """Largest mean |log-prob(engine) - log-prob(trainer)|, in nats, that the parity probe accepts after a refit."""


class RefitConfig(Section):
    """How the engine is checked after a refit."""

    probe_every: Adjustable[PositiveInt] = 8
    """Number of steps between probes of the drafter's acceptance. It is also probed at the start of a job and before a
    checkpoint, and its tensors are compared at every refit."""


def batched_tokens(max_num_seqs: int, longest_draft: int) -> int:
    """The largest number of tokens in an engine's forward pass, which can verify all running drafts at once."""
    return max(MIN_BATCHED_TOKENS, max_num_seqs * (longest_draft + 1))


BubbleUse = Literal["none", "pregenerate", "train_drafter", "both"]


class BubblesConfig(Section):
    """How an engine that has finished its rollouts of a step uses the time until the slowest engine finishes."""

    use: Adjustable[BubbleUse] = "none"
    """How to use the time: `pregenerate` generates responses to the next step's prompts, which become its drafts;
    `train_drafter` updates the drafter; `both` updates it once all of these responses exist."""

    @property
    def pregenerates(self) -> bool:
        """Whether idle engines generate responses to the next step's prompts."""
        return self.use in ("pregenerate", "both")

    @property
    def trains_drafter(self) -> bool:
        """Whether the ranks of idle engines train the drafter."""
        return self.use in ("train_drafter", "both")
