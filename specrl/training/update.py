"""The policy update from scored rollouts: which rank trains on what, the loss, and the resulting log-probs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specrl.algorithms.objective import TokenTargets, kl_estimates, policy_loss, response_weights
from specrl.config import Config, TrainConfig
from specrl.data.problems import derive_seed
from specrl.models.families import expert_shape_of_model
from specrl.precision.mismatch import MismatchSums
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.features import Features
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch
from specrl.training.sample import Sample, sample_sequences
from specrl.training.schedules import lr_factor
from specrl.training.shares import Rows, TrainingShares

OF_UPDATES = ("loss", "grad_norm", "lr")
"""The metrics of an update as a whole; the others are means over its tokens."""


@dataclass(frozen=True)
class PolicyUpdate:
    metrics: dict[str, float]
    """The means over the updates of `loss`, `grad_norm` and `lr`; the means over the trained tokens of `entropy`, `kl`,
    `corrected_fraction`, with a teacher `teacher_kl`, and the loss's own metrics; `real_token_share` and
    `shared_token_share` (see `_packing`). Without a trained token there are none of these. Always `num_tokens`, prompts
    included, `logprob_s`, the seconds of separate log-prob passes, and, where features are kept, `sampled_fraction`,
    the share of the sequences that they are of."""
    features: list[Features | None]
    """This rank's share of the features of a sample within `drafter.max_tokens_per_step`, because those of a whole step
    would fill the memory. They are the drafter's micro-batches, see `Drafter.update`."""
    mismatch: MismatchSums
    """The disagreement of the engines about this rank's share of the tokens trained on; every share is counted on one
    rank only."""
    routing: dict[str, float]
    """Their disagreement about experts over all ranks, as `mismatch/routing_...` metrics; empty without experts."""


@dataclass(frozen=True)
class StepLoss:
    """The loss of all updates of a step: a `LossFn` that looks up the data of each sequence in a micro-batch."""

    config: TrainConfig
    own: Mapping[int, TokenSequence]
    """The rollouts that this rank trains on, by their numbers."""
    advantages: NDArray[np.float64]
    num_tokens: float
    """The divisor of an update's loss, the same on all ranks."""
    weights: NDArray[np.float64] | None = None
    """The factors of `response_weights`."""
    old: Rows = field(default_factory=dict)
    """Log-probs before the first of several updates; empty with a single update."""
    reference: Rows = field(default_factory=dict)
    """Log-probs under the reference policy; empty without a KL penalty in the loss."""
    teacher: Rows = field(default_factory=dict)
    """Log-probs under `train.teacher`; empty without one."""
    recorded: list[tuple[MicroBatch, Tensor]] = field(default_factory=list)
    """The log-probs of each micro-batch, where there are no `old` ones: the only update's pass finds them."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.old:
            self.recorded.append((batch, logprobs.detach()))
        total, metrics = policy_loss(logprobs, entropy, batch.mask, self.targets(batch), self.config)
        return total / self.num_tokens, {name: value / self.num_tokens for name, value in metrics.items()}

    def targets(self, batch: MicroBatch) -> TokenTargets:
        rows = [self.own[number].generation_logprobs for number in batch.indices]

        def spread(values: NDArray[np.float64]) -> Tensor:
            found = [np.full(len(row), values[number]) for number, row in zip(batch.indices, rows, strict=True)]
            return align(found, batch.mask, batch.num_tokens)

        return TokenTargets(
            advantages=spread(self.advantages),
            generation_logprobs=align(rows, batch.mask, batch.num_tokens),
            old_logprobs=_aligned(self.old, batch),
            reference_logprobs=_aligned(self.reference, batch),
            weights=None if self.weights is None else spread(self.weights),
            teacher_logprobs=_aligned(self.teacher, batch),
        )


def update_policy(
    policy: Policy,
    rollouts: RolloutBatch,
    config: Config,
    layers: tuple[int, ...] | None,
    *,
    step: int,
    teacher: Policy | None = None,
) -> PolicyUpdate:
    """Train the policy on the groups that carry signal (collective).

    With `updates_per_step = 1` the forward pass of the update is also the log-prob pass. The trained rollouts get their
    `policy_logprobs`, under the policy that sampled them, on the rank that writes them.

    Args:
        layers: The layers whose features are kept for the drafter, if it is trained.
        teacher: The frozen policy of `train.teacher`, with the same layout over the ranks as the policy.
    """
    started = time.perf_counter()
    in_reward = config.train.kl_coef and config.train.kl_in == "reward"
    kl = _penalise_rewards(policy, rollouts, config) if in_reward else None
    penalty_s = time.perf_counter() - started
    parts = _split_by_group(rollouts, trained_rollouts(rollouts, config.train), config.train.updates_per_step)
    shares = TrainingShares.of(policy, rollouts, parts)
    experts = expert_shape_of_model(policy.hf_config)
    routes_of = (experts.route_type, (policy.hf_config.num_hidden_layers, experts.per_token)) if experts else None
    own = shares.deliver(rollouts, routes_of)
    batches = [_micro_batches(policy, own, shares.own(update), config) for update in range(len(parts))]
    started = time.perf_counter()
    routes = policy.routing  # measured in the pass under the policy that sampled
    if routes is not None:
        routes.clear()
    old = _logprob_pass(policy, batches, config) if len(parts) > 1 else {}
    routing = routes.disagreement() if routes is not None and len(parts) > 1 else {}
    # Groups without signal count too: otherwise the few groups of a step with little signal would move the policy as
    # far as many do. Leaving them out saves time, and changes nothing.
    num_tokens = int(rollouts.response_lengths[rollouts.in_loss].sum()) / config.train.updates_per_step
    weights = _response_weights(rollouts, config)
    reference = _reference_logprobs(policy, batches, config) if config.train.penalises_tokens else {}
    taught = _logprob_pass(teacher, _unrouted(batches), config) if teacher is not None else {}
    loss = StepLoss(config.train, own, rollouts.advantages, num_tokens, weights, old, reference, taught)
    logprob_s = penalty_s + time.perf_counter() - started
    sample = _sample(policy, batches, config, step) if layers is not None else None
    results, kept = _run_updates(policy, loss, batches, config, layers, sample, step)
    routing |= routes.disagreement() if routes is not None and len(parts) == 1 else {}
    trained = sum(int(rollouts.response_lengths[part].sum()) for part in parts)
    metrics = _means(results, num_tokens / trained if trained else 0.0)
    features: list[Features | None] = []
    if sample is not None:
        sampled = sum(policy.ranks.gather(len(sample.windows))) / policy.model_size
        metrics["sampled_fraction"] = sampled / max(sum(map(len, parts)), 1)
        features = sample.arrange(kept, chain.from_iterable(batches), policy.model_rank)
    sampled_with = old or _rows(loss.recorded)
    shares.return_logprobs(rollouts, sampled_with)
    counted = [own[number].generation_logprobs for number in sampled_with] if shares.reports else []
    mismatch = MismatchSums.of(_joined(list(sampled_with.values()) if shares.reports else []), _joined(counted))
    metrics |= {"num_tokens": float(sum(int(rollouts.lengths[part].sum()) for part in parts)), "logprob_s": logprob_s}
    if parts and kl is not None:
        metrics["kl"] = kl
    metrics |= _packing(policy, batches) if parts else {}
    return PolicyUpdate(metrics, features, mismatch, routing)


def _penalise_rewards(policy: Policy, rollouts: RolloutBatch, config: Config) -> float:
    """Assign advantages by rewards and by `train.kl_coef` times each response's KL divergence (collective).

    The policy's log-probs are the engine's, under the policy that sampled.

    Returns:
        The mean of the estimates.
    """
    of_batch = np.isin(rollouts.prompt_ids, rollouts.prompt_ids[rollouts.in_loss])  # truncated responses too
    shares = TrainingShares.of(policy, rollouts, [np.flatnonzero(of_batch).tolist()])
    own = shares.deliver(rollouts)
    reference = _reference_logprobs(policy, [_micro_batches(policy, own, shares.own(0), config)], config)
    found: dict[int, float] = {}
    for number, row in reference.items() if shares.reports else ():
        sampled, given = (
            torch.tensor(values, dtype=torch.float64) for values in (own[number].generation_logprobs, row)
        )
        found[number] = float(kl_estimates(sampled, given, config.train.kl_estimator).sum())
    for sums in policy.ranks.gather(found):
        rollouts.kl[list(sums)] = list(sums.values())
    rollouts.assign_advantages(config)
    return float(rollouts.kl.sum()) / max(1, int(rollouts.response_lengths[of_batch].sum()))


def _response_weights(rollouts: RolloutBatch, config: Config) -> NDArray[np.float64] | None:
    lengths = rollouts.response_lengths[rollouts.in_loss].tolist()
    found = response_weights(lengths, config.train.loss_mean, config.sampling.max_response_tokens)
    if found is None:
        return None
    weights = np.zeros(len(rollouts))
    weights[rollouts.in_loss] = found
    return weights


def _packing(policy: Policy, batches: list[list[MicroBatch]]) -> dict[str, float]:
    """How much of the policy's passes is padding, and how much shared prompts save (collective).

    `real_token_share` is the share of the computed tokens that belong to a sequence, and `shared_token_share` the share
    of the sequences' tokens that need not be computed, because another sequence has the same prompt.
    """
    own = [batch for part in batches for batch in part]
    counts = [(len(batch.tokens), batch.num_real, batch.num_shared) for batch in own]
    gathered = policy.ranks.gather(np.array(counts, np.int64).reshape(-1, 3).sum(0).tolist())
    computed, real, shared = np.sum(gathered, 0).tolist()
    return {"real_token_share": real / max(computed, 1), "shared_token_share": shared / max(real + shared, 1)}


def _sample(policy: Policy, own: list[list[MicroBatch]], config: Config, step: int) -> Sample:
    return sample_sequences(
        own,
        max_tokens=config.drafter.max_tokens_per_step,
        tokens_per_micro_batch=config.policy.tokens_per_micro_batch,
        owners=policy.model_size,
        seed=derive_seed(config.seed, "drafter's sample", step, policy.dp_rank),
    )


def align(rows: Sequence[ArrayLike], mask: Tensor, num_tokens: int) -> Tensor:
    """Spread each sequence's values over the True places of its row of `mask`, `num_tokens` in all; zeros elsewhere.

    The number is given because counting on the GPU would make the host wait.
    """
    flat = torch.from_numpy(_joined(rows)).to(mask.device)
    assert len(flat) == num_tokens, "one value per response token"
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, flat)


def _aligned(rows: Rows, batch: MicroBatch) -> Tensor | None:
    return align([rows[number] for number in batch.indices], batch.mask, batch.num_tokens) if rows else None


def _joined(rows: Sequence[ArrayLike]) -> NDArray[np.float32]:
    return np.concatenate([np.empty(0, np.float32), *(np.asarray(row, np.float32) for row in rows)])


def trained_rollouts(rollouts: RolloutBatch, config: TrainConfig) -> list[int]:
    """Choose the rollouts to train on: those in the loss, without the groups in which all advantages are 0.

    A response with advantage 0 in a group with signal stays: the mean of the loss, the mismatch and the drafter's
    training include its tokens.
    """
    chosen = rollouts.in_loss
    if config.leaves_groups_out:
        chosen = chosen & np.isin(rollouts.prompt_ids, rollouts.prompt_ids[chosen & (rollouts.advantages != 0)])
    numbers: list[int] = np.flatnonzero(chosen).tolist()
    return numbers


def learning_rate(config: Config, step: int, update: int) -> float:
    """The policy's learning rate in one of a step's updates; it follows RL steps, whatever these left out."""
    policy, train = config.policy, config.train
    factor = lr_factor(
        step + update / train.updates_per_step,
        train.num_steps,
        decay=policy.lr_schedule,
        warmup_steps=policy.lr_warmup_steps,
        final_fraction=policy.lr_final_fraction,
    )
    return policy.lr * factor


def _split_by_group(rollouts: RolloutBatch, chosen: list[int], parts: int) -> list[list[int]]:
    """Deal the chosen rollouts into nonempty parts whose numbers of groups differ by at most one."""
    groups = rollouts.groups(chosen)
    dealt = (groups[part::parts] for part in range(min(parts, len(groups))))
    return [[number for group in part for number in group] for part in dealt]


def _micro_batches(
    policy: Policy, own: Mapping[int, TokenSequence], numbers: list[int], config: Config
) -> list[MicroBatch]:
    return pack([own[number] for number in numbers], config.policy.tokens_per_micro_batch, policy.pad_multiple)


def _run_updates(
    policy: Policy,
    loss: StepLoss,
    batches: list[list[MicroBatch]],
    config: Config,
    layers: tuple[int, ...] | None,
    sample: Sample | None,
    step: int,
) -> tuple[list[dict[str, float]], list[Features]]:
    results, features = list[dict[str, float]](), list[Features]()
    for update, own in enumerate(batches):
        result, kept = policy.train_step(
            own,
            loss,
            features=layers,
            windows=sample.kept if sample is not None else None,
            temperature=config.sampling.temperature,
            lr=learning_rate(config, step, update),
        )
        results.append(result)
        features += kept
    return results, features


def _means(results: list[dict[str, float]], per_token: float) -> dict[str, float]:
    """The means over the updates; sums over tokens are first rescaled by `per_token` to means per trained token."""
    names = dict.fromkeys(chain.from_iterable(results))
    sums = {name: sum(result.get(name, 0.0) for result in results) for name in names}
    return {name: total / len(results) if name in OF_UPDATES else total * per_token for name, total in sums.items()}


def _rows(found: Iterable[tuple[MicroBatch, Tensor]]) -> Rows:
    return {
        number: row[:length]
        for batch, logprobs in found
        for number, row, length in zip(batch.indices, logprobs.cpu().numpy(), batch.sampled_lengths, strict=True)
    }


def _logprob_pass(policy: Policy, batches: list[list[MicroBatch]], config: Config) -> Rows:
    flat = [batch for part in batches for batch in part]
    found = policy.logprobs(flat, temperature=config.sampling.temperature)
    return _rows(zip(flat, found, strict=True))


def _reference_logprobs(policy: Policy, batches: list[list[MicroBatch]], config: Config) -> Rows:
    with policy.reference_weights():
        return _logprob_pass(policy, _unrouted(batches), config)


def _unrouted(batches: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
    # Another policy, the reference or the teacher, routes tokens to the experts that it chooses itself.
    return [[replace(batch, routes=None) for batch in part] for part in batches]
