"""The policy's trainer, the drafter, the RL step, precision and validation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specrl.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class PolicyConfig(Section):
    """Megatron-core trainer of the policy."""

    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    lr: PositiveFloat = 1e-5
    lr_warmup_steps: NonNegativeInt = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    clip_grad: PositiveFloat = 1.0
    tokens_per_micro_batch: PositiveInt = 1024
    """Sequences of similar length are packed into one micro-batch until its padded size reaches this."""
    recompute: bool = False
    """Recompute activations in the backward pass: less memory, a third more compute."""


class DrafterConfig(Section):
    """The drafter: EAGLE-3's shape, pretraining on the policy's own responses, online update.

    A policy's multi-token-prediction layer (`speculation.method = "mtp"`) is trained the same way, from what it is; its
    shape is the policy's. Its loss is never added to the policy's: it has its own optimizer, and its learning rates
    are what a loss weight would be.
    """

    draft_vocab_size: PositiveInt = 2048
    """Tokens that EAGLE-3 drafts."""
    intermediate_size: PositiveInt | None = None
    """MLP width of EAGLE-3; the policy's by default."""
    ttt_steps: Annotated[int, Field(ge=1, le=7)] = 3
    """Training-time-test unrolling depth."""
    num_prompts: PositiveInt = 160
    """Prompts answered for pretraining."""
    samples_per_prompt: PositiveInt = 2
    epochs: PositiveInt = 6
    lr: PositiveFloat = 1e-3
    online_lr: NonNegativeFloat = 1e-4
    """Learning rate of the update in each RL step; 0 freezes the drafter."""
    clip_grad: PositiveFloat = 0.5
    tokens_per_micro_batch: PositiveInt = 512
    """Padded tokens per rank and optimizer step of the pretraining."""
    max_tokens_per_step: PositiveInt = 32768
    """Features of at most this many padded tokens per rank are recorded for the online update, longest first."""
    max_tokens_per_window: PositiveInt = 131072
    """Features of at most this many padded tokens per rank are held at once in pretraining. If all fit they are
    computed once; otherwise anew in every epoch, window by window: slower, with the same result."""


class TrainConfig(Section):
    num_steps: PositiveInt = 8
    prompts_per_step: PositiveInt = 16
    samples_per_prompt: Annotated[int, Field(ge=2)] = 4
    """Group size: advantages are relative to the group."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps per batch; 1 is strictly on-policy and needs no separate log-prob pass."""
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the reference policy; 0 keeps no reference."""
    normalize_by_std: bool = True
    drop_zero_signal_groups: bool = True
    """Leave out groups whose rewards are all equal."""
    importance_correction: Literal["none", "tis", "icepop", "seq-mask"] = "tis"
    """For what p_training / p_generation of the sampled tokens says: `tis` truncates the ratio at `importance_cap`,
    `icepop` masks tokens whose ratio is outside `importance_range`, `seq-mask` masks responses by `sequence_mask`."""
    importance_cap: PositiveFloat = 2.0
    importance_range: tuple[PositiveFloat, PositiveFloat] = (0.5, 5.0)
    """Lowest and highest ratio that `icepop` and `seq-mask` keep."""
    sequence_mask: Literal["any", "mean"] = "any"
    """`seq-mask` drops a response when any ratio of its tokens is outside, or when their geometric mean is."""
    checkpoint_every: PositiveInt = 1
    """Steps between checkpoints; a restart redoes at most this many."""
    keep_checkpoints: PositiveInt = 2

    @model_validator(mode="after")
    def _range_holds_one(self) -> Self:
        low, high = self.importance_range
        if not low < 1 < high:
            raise ValueError(f"importance_range = [{low:g}, {high:g}]: must hold 1, the ratio of engines that agree")
        return self


class PrecisionConfig(Section):
    """FP8: e4m3, weights in blocks of 128x128, activations in blocks of 1x128; the drafter stays in BF16."""

    generation: Literal["bf16", "fp8"] = "bf16"
    training: Literal["bf16", "fp8"] = "bf16"
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    """KV cache of the engine; its scales are measured anew in every step."""
    hardware: Literal["any", "native"] = "any"
    """`native` refuses to emulate FP8 on devices without it."""
    scales: Literal["fp32", "power_of_two"] = "fp32"
    bf16_first_layers: NonNegativeInt = 0
    """Transformer layers at the beginning that stay in BF16, whatever the calibration finds."""
    bf16_last_layers: NonNegativeInt = 0
    """The same at the end."""
    max_kl: PositiveFloat = 0.005
    """Budget of the calibration, nats per token at the model's output."""
    calibration_tokens: PositiveInt = 2048
    max_token_mult_prob_error: Annotated[float, Field(gt=1)] = 1.5
    """Largest mean exp(|log p_training - log p_generation|) of a step's tokens, the largest thousandth of them left
    out; above it the run stops. 1 is perfect agreement."""

    @property
    def uses_fp8(self) -> bool:
        return "fp8" in (self.generation, self.training, self.kv_cache)


class ValidateConfig(Section):
    num_prompts: PositiveInt = 128
    """Held-out prompts for the accuracy before and after."""
    speed_batches: tuple[PositiveInt, ...] = (1, 4, 16)
    speed_prompts: PositiveInt = 16
    """Held-out prompts of each timed pair; a larger batch takes at least one full batch."""
    speed_repeats: PositiveInt = 3
    """Interleaved plain/speculative pairs per batch size; the median ratio counts."""
    exactness_prompts: PositiveInt = 16
    """Held-out prompts answered with and without speculation, sampled and greedy, and compared token by token."""
    exactness_samples: PositiveInt = 128
    """Speculative samples of the first tokens of each of two held-out prompts, for the chi-squared test."""
