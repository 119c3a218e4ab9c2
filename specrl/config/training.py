"""The policy's trainer, the drafter, the RL step, precision and validation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specrl.config.algorithms import ADVANTAGES, CORRECTIONS, LOSSES, Advantage, Algorithm, Correction, Loss, Registry
from specrl.config.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

LrDecay = Literal["constant", "linear", "cosine"]


class PolicyConfig(Section):
    """Megatron-core trainer of the policy."""

    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    lr: PositiveFloat = 1e-5
    """Peak learning rate of the RL updates."""
    lr_schedule: LrDecay = "constant"
    """How the learning rate falls over the run's updates, to `lr_final_fraction` of `lr` after the last."""
    lr_warmup_steps: NonNegativeInt = 0
    """Updates in which the learning rate rises linearly to what the schedule says."""
    lr_final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
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
    loss: Loss = Field(default_factory=LOSSES.default)
    """The policy loss, one of `specrl/algorithms/losses.py` or an import path; a table of `name` and its options."""
    advantage: Advantage = Field(default_factory=ADVANTAGES.default)
    """The advantage estimator, from `specrl/algorithms/advantages.py`; given as the loss is."""
    correction: Correction = Field(default_factory=CORRECTIONS.default)
    """What becomes of tokens on whose probability the engine and the trainer disagree, from
    `specrl/algorithms/corrections.py`; given as the loss is."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the reference policy; 0 keeps no reference."""
    drop_zero_signal_groups: bool = True
    """Leave out groups whose rewards are all equal."""
    checkpoint_every: PositiveInt = 1
    """Steps between checkpoints; a restart redoes at most this many."""
    keep_checkpoints: PositiveInt = 2

    @property
    def algorithms(self) -> tuple[tuple[Registry, Algorithm], ...]:
        """The chosen functions, each with the registry it is from."""
        return (LOSSES, self.loss), (ADVANTAGES, self.advantage), (CORRECTIONS, self.correction)

    @property
    def num_updates(self) -> int:
        """The number of optimizer steps of the whole run."""
        return self.num_steps * self.updates_per_step


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
