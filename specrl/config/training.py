"""Configuration of the policy's trainer, the drafter, the RL step and precision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from specrl.config.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    DRAFT_LOSSES,
    LOSSES,
    Advantage,
    Algorithm,
    Correction,
    DraftLoss,
    Loss,
    Registry,
    expand_preset,
)
from specrl.config.base import (
    Adjustable,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from specrl.config.text import Places, UserPath, UserPlace
from specrl.config.validation import StopConfig

LrDecay = Literal["constant", "linear", "cosine"]


class LoraConfig(Section):
    """LoRA: all linear layers of attention and MLP get low-rank adapters, and only these are trained."""

    rank: PositiveInt = 8
    """The number of rows of A and of columns of B, whose product is added to a weight matrix."""
    alpha: PositiveFloat = 16.0
    """The product is multiplied by `alpha / rank`."""

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / self.rank


class PolicyConfig(Section):
    """The Megatron-core trainer of the policy: its layout over the ranks, AdamW, and micro-batches."""

    tensor_parallel: Adjustable[PositiveInt] = 1
    """Number of ranks that share each layer."""
    pipeline_parallel: Adjustable[PositiveInt] = 1
    """Number of ranks that share the stack of layers."""
    expert_parallel: Adjustable[PositiveInt] = 1
    """Number of ranks that share the experts of each layer, in a model with experts. They are ranks of one pipeline
    stage; tensor parallelism does not split experts."""
    lr: Adjustable[PositiveFloat] = 1e-5
    """Peak learning rate of the RL updates."""
    lr_schedule: Adjustable[LrDecay] = "constant"
    """How the learning rate changes over `train.num_steps`: it stays at `lr`, or falls linearly or as a cosine. A run
    that is extended continues at its place in the longer schedule, at a higher rate than it ended with."""
    lr_warmup_steps: Adjustable[NonNegativeInt] = 0
    """Number of RL steps at the beginning in which the learning rate rises linearly to the schedule's value."""
    lr_final_fraction: Adjustable[Annotated[float, Field(ge=0, le=1)]] = 0.1
    """Fraction of `lr` that a linear or cosine schedule reaches after the last step."""
    weight_decay: Adjustable[Annotated[float, Field(ge=0)]] = 0.0
    """Decoupled weight decay of AdamW."""
    beta1: Adjustable[Annotated[float, Field(ge=0, lt=1)]] = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: Adjustable[Annotated[float, Field(ge=0, lt=1)]] = 0.95
    """Decay rate of AdamW's second moment."""
    clip_grad: Adjustable[PositiveFloat] = 1.0
    """Global gradient norm above which gradients are scaled down."""
    tokens_per_micro_batch: Adjustable[PositiveInt] = 1024
    """Largest size of a micro-batch in tokens, with a prompt counted once for all of its responses; a single sequence
    may exceed it."""
    recompute: Adjustable[bool] = False
    """Whether activations are recomputed in the backward pass, which saves memory and costs a third more compute."""
    routing_replay: Adjustable[bool] = True
    """Whether a policy with experts trains each token with the experts that the engine used to sample it (R3, arXiv
    2510.11370), instead of those that the trainer's own router would choose; other policies ignore it."""
    lora: LoraConfig | None = None
    """Adapters that are trained instead of the weights, such as `{ rank = 8, alpha = 16 }`; None trains all weights."""


class DrafterConfig(Section):
    """The drafter: the shape of EAGLE-3, pretraining on the policy's own responses, and the online update.

    A policy's multi-token-prediction layer (`speculation.method = "mtp"`) is trained in the same way, starting from its
    own weights; its shape is the policy's. The drafter's loss is never added to the policy's: the drafter has its own
    optimizer, and learning rates replace a loss weight.
    """

    source: UserPlace | None = None
    """An EAGLE-3 drafter to start from instead of a new one: a directory or a hub id, in the original layout or that of
    `speculators`. `prepare` checks it and says what it found. Its own sizes replace those below. A run started `--from`
    another takes that run's drafter instead, if it has one of the same kind."""
    draft_vocab_size: PositiveInt = 2048
    """Number of tokens that EAGLE-3 can draft; with the size of the policy's vocabulary, it can draft all."""
    num_layers: Annotated[int, Field(ge=1, le=4)] = 1
    """Number of EAGLE-3's decoder layers."""
    feature_layers: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """The policy's layers, counted from 0 and in ascending order, whose inputs EAGLE-3 reads; the number of layers
    stands for the output of the last one. By default the published choice for a policy of n layers: 2, n // 2 and n -
    3."""
    intermediate_size: PositiveInt | None = None
    """Width of EAGLE-3's MLPs; the policy's by default."""
    sliding_window: Annotated[int, Field(ge=16)] | None = None
    """Number of positions that EAGLE-3's attention sees, including its own; all by default."""
    ttt_steps: Annotated[int, Field(ge=1, le=7)] = 3
    """Number of draft positions that the training-time test unrolls."""
    loss: Adjustable[DraftLoss] = Field(default_factory=DRAFT_LOSSES.default)
    """The drafter's loss: `cross_entropy`, an import path `package.module:function`, or a table of that `name` and the
    loss's options."""
    position_decay: Adjustable[Fraction] = 0.8
    """Weight of each draft position in the loss relative to the one before it."""
    num_prompts: Annotated[int, Field(ge=2)] = 160
    """Number of prompts that the policy answers for the pretraining; at least 2, because the calibration chooses layers
    on some of them and checks the choice on others."""
    samples_per_prompt: PositiveInt = 2
    """Number of responses to each of these prompts."""
    data: Places | None = None
    """Files of other prompts for the pretraining, in the formats of `data.path`, such as chats like those that the
    drafter is to serve. Each row has `messages`, a chat (or ShareGPT's `conversations`), or `prompt`. The policy writes
    its own answers, whatever answers the file has; they are mixed with those to the task's prompts, and used for
    nothing else."""
    data_prompts: PositiveInt = 160
    """Number of prompts from `data` that the policy answers, in random order."""
    epochs: NonNegativeInt = 6
    """Number of passes over these responses. With 0, the drafter of `source` is measured on them but not trained before
    RL."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate of the pretraining."""
    online_lr: Adjustable[NonNegativeFloat] = 1e-4
    """Learning rate of the update in each RL step; 0 freezes the drafter. With 1e-3, drafts of the quickstart's drafter
    were accepted less often than those of a frozen one."""
    update_every: Adjustable[PositiveInt] = 1
    """RL steps between updates of the drafter. The last step of a run always updates it, for the export."""
    clip_grad: Adjustable[PositiveFloat] = 0.5
    """Global gradient norm above which gradients are scaled down."""
    tokens_per_micro_batch: PositiveInt = 512
    """Number of tokens per rank and optimizer step of the pretraining, with a prompt counted for each of its
    responses."""
    max_tokens_per_step: Adjustable[PositiveInt] = 32768
    """Largest number of tokens, padding included, for which the ranks that hold one copy of the policy record features
    in an RL step, to update the drafter. If the step has more, a sample of its sequences is taken, evenly by length,
    with at most an eighth of this number (or 256 tokens) of each, at a random place. The ranks divide the sequences
    among them."""
    max_tokens_per_window: PositiveInt = 131072
    """Largest number of tokens, padding included, whose features the ranks that hold one copy of the policy keep at
    once in pretraining. If all features fit, they are computed once; otherwise they are recomputed in every epoch,
    which is slower and gives the same result."""

    @field_validator("feature_layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is not None and list(layers) != sorted(set(layers)):
            raise ValueError(f"{list(layers)}: the layers must be in ascending order, each once")
        return layers

    @property
    def num_features(self) -> int:
        """The number of the policy's hidden states that EAGLE-3 reads for each token; 3 by default."""
        return 3 if self.feature_layers is None else len(self.feature_layers)


LossMean = Literal["token", "response", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]


class TrainConfig(Section):
    """The RL steps: their size, the algorithms, and checkpoints."""

    num_steps: Adjustable[PositiveInt] = 8
    """Number of RL steps of the run."""
    prompts_per_step: Adjustable[PositiveInt] = 16
    """Number of prompts in a step."""
    samples_per_prompt: Adjustable[Annotated[int, Field(ge=2)]] = 4
    """Number of responses to each prompt. They form a group, and advantages are relative to it."""
    whole_groups: Adjustable[bool | None] = None
    """Whether one engine generates all responses to a prompt. Otherwise responses, not prompts, are dealt to the
    engines in turn, which then finish at about the same time, but read more prompts. By default, groups stay whole only
    if `sampling.max_response_tokens` is at most 1024. It changes nothing but the order in which gradients are added."""
    updates_per_step: Adjustable[PositiveInt] = 1
    """Number of optimizer steps on the rollouts of a step, each on different groups; 1 is strictly on-policy and needs
    no separate pass for log-probs."""
    algorithm: str | None = None
    """A preset that replaces other settings of this section in the run's own configuration: `dapo`, `dr-grpo`, `gspo`,
    `cispo`, `rloo`, `reinforce++` or `gdpo`."""
    loss: Adjustable[Loss] = Field(default_factory=LOSSES.default)
    """The policy loss: a name from `specrl/algorithms/losses.py`, an import path `package.module:function`, or a table
    of that `name` and the loss's options."""
    advantage: Adjustable[Advantage] = Field(default_factory=ADVANTAGES.default)
    """The advantage estimator from `specrl/algorithms/advantages.py`, given in the same way as the loss."""
    correction: Adjustable[Correction] = Field(default_factory=CORRECTIONS.default)
    """The correction, which weights tokens whose probabilities differ between engine and trainer, from
    `specrl/algorithms/corrections.py`, given in the same way as the loss."""
    loss_mean: Adjustable[LossMean] = "token"
    """What the loss is averaged over: all response tokens of the step (`token`: DAPO), responses, each with the mean
    over its own tokens (`response`: GRPO, GSPO), or responses, each with the sum over its tokens divided by
    `sampling.max_response_tokens` (`constant`: Dr. GRPO)."""
    refill_rounds: Adjustable[NonNegativeInt] = 0
    """How many times per step groups whose rewards are all equal are replaced by other prompts (DAPO's dynamic
    sampling); 0 replaces none. If groups are still missing after that, dropped ones fill the gap: they count in the
    mean of the loss, but contribute no gradient without a teacher."""
    overlong_filter: Adjustable[bool] = False
    """Whether responses that were cut off at `sampling.max_response_tokens` are left out of the update, and of the mean
    of the loss. Their rewards still count for the advantages of their groups."""
    overlong_window: Adjustable[Annotated[float, Field(ge=0, le=1)]] = 0.0
    """The last part of `sampling.max_response_tokens`, as a fraction, in which a response is punished for its length:
    the penalty grows linearly from 0 to -1 (DAPO's soft overlong punishment); with 0 there is none. Reported rewards
    exclude the penalty, and so do those that `refill_rounds` considers."""
    kl_coef: Adjustable[Annotated[float, Field(ge=0)]] = 0.0
    """Weight of the KL penalty towards the reference policy, which is the policy before RL unless `reference_every`
    renews it; with 0, no reference is kept in memory."""
    kl_estimator: Adjustable[KlEstimator] = "k3"
    """The estimate of the KL divergence at a token: with l = log p - log p_reference, `k1` is l, `k2` is l^2 / 2, and
    `k3` is exp(-l) - 1 + l."""
    kl_in: Adjustable[Literal["loss", "reward"]] = "loss"
    """Where the penalty applies: in the loss of each token, or in the reward of a response. There the sum over its
    tokens, less the mean sum of its group's other responses, is subtracted from the advantage, not normalised."""
    reference_every: Adjustable[PositiveInt | None] = None
    """After every so many steps the policy becomes the reference; by default the policy before RL stays the reference.
    With this setting, checkpoints include the reference."""
    teacher: Adjustable[UserPath | None] = None
    """The Hugging Face directory of a frozen model with the policy's tokenizer, of any size and family, that scores the
    sampled tokens (on-policy distillation). `teacher_coef` times log p_teacher - log p is added to the advantage of
    each token. By default there is no teacher."""
    teacher_coef: Adjustable[PositiveFloat] = 1.0
    """Weight of the teacher's part of an advantage; with `advantage = "none"` it is the only part."""
    entropy_coefficient: Adjustable[NonNegativeFloat] = 0.0
    """Weight of the bonus for the policy's entropy at each response token, in nats, averaged as the loss is."""
    drop_zero_signal_groups: Adjustable[bool] = True
    """Whether groups whose rewards are all equal are left out of the update, which saves their passes and changes no
    gradient: the loss is still divided by the tokens of all groups of the step. With a KL penalty in the loss, an
    entropy bonus or a teacher, which act on all groups, none is left out."""
    checkpoint_every: Adjustable[PositiveInt] = 1
    """Number of steps between checkpoints; a restart repeats at most this many."""
    keep_checkpoints: Adjustable[PositiveInt] = 2
    """Number of newest checkpoints to keep; the best one is kept as well."""
    keep_every: Adjustable[PositiveInt | None] = None
    """Also keep the checkpoints of all steps that are multiples of this number, which must be a multiple of
    `checkpoint_every`, or 1 for all checkpoints. By default none are kept in addition."""
    trace_steps: Adjustable[tuple[NonNegativeInt, ...]] = ()
    """Steps for which each rank writes a Perfetto trace with every operator and kernel. Such a step is slower, and its
    trace takes hundreds of MiB if responses are long."""
    best_metric: Adjustable[str | None] = None
    """The metric of a held-out set that decides which validated policy is the best, such as
    `validation/held-out/pass_at_k`; by default the accuracy on the first set, if `validate.every` is set."""
    final: Adjustable[Literal["last", "best"]] = "last"
    """The policy that `validate` measures and `export` exports: that of the last step, or the best one."""
    stop_when: Adjustable[StopConfig | None] = None
    """When to end before `num_steps`, such as `{ metric = "validation/held-out/accuracy", above = 0.95 }`."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        return expand_preset(data) if isinstance(data, dict) else data

    @property
    def penalises_tokens(self) -> bool:
        """Whether the token loss includes a KL penalty."""
        return bool(self.kl_coef) and self.kl_in == "loss"

    @property
    def leaves_groups_out(self) -> bool:
        """Whether groups without signal have no gradient and are left out."""
        on_all = self.penalises_tokens or bool(self.entropy_coefficient) or self.teacher is not None
        return self.drop_zero_signal_groups and not on_all

    @property
    def renews_reference(self) -> bool:
        """Whether there is a changing reference, which checkpoints must include."""
        return bool(self.kl_coef) and self.reference_every is not None

    @property
    def algorithms(self) -> tuple[tuple[Registry, Algorithm], ...]:
        """The chosen functions, each with its registry."""
        return (LOSSES, self.loss), (ADVANTAGES, self.advantage), (CORRECTIONS, self.correction)


class PrecisionConfig(Section):
    """FP8 (e4m3) with one scale per block: 128x128 for weights, 1x128 for activations. The drafter stays in BF16."""

    generation: Literal["bf16", "fp8"] = "bf16"
    """The precision in which the engine's linear layers compute."""
    training: Literal["bf16", "fp8"] = "bf16"
    """The precision in which the trainer's linear layers compute."""
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    """The type of the engine's KV cache; the scales of an FP8 cache are measured again in every step."""
    bf16_edges: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)
    """How many of the first and of the last transformer layers stay in BF16, whatever the calibration finds."""
    max_kl: PositiveFloat = 0.005
    """Largest KL divergence of the model's output from BF16 that the calibration allows, in nats per token."""
    calibration_tokens: PositiveInt = 2048
    """Number of tokens on which the calibration measures; it uses at least one response to each of two prompts."""
    calibration_length: PositiveInt = 8192
    """Largest length of a sequence that the calibration reads, in tokens; longer responses are cut at their end."""
    max_token_mult_prob_error: Adjustable[Annotated[float, Field(gt=1)]] = 1.5
    """Largest mean of exp(|log p_training - log p_generation|) over a step's tokens, without the largest thousandth of
    the terms; if it is exceeded, the run stops. 1 is perfect agreement."""

    @property
    def uses_fp8(self) -> bool:
        """Whether anything is computed or stored in FP8."""
        return "fp8" in (self.generation, self.training, self.kv_cache)
