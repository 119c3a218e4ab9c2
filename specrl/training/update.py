"""The policy update from scored rollouts: which rank trains on what, the loss, and the log-probs that come back."""

from __future__ import annotations

import time
from itertools import chain

import torch
from torch import Tensor

from specrl.algorithms.advantages import group_advantages
from specrl.algorithms.objective import TokenTargets, policy_loss
from specrl.config import Config, TrainConfig
from specrl.data.dealing import deal_longest_first
from specrl.data.problems import derive_seed
from specrl.schemas import Rollout
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.features import Features, FeatureSpec
from specrl.training.megatron.policy import LossFn, Policy
from specrl.training.sample import Sample, sample_sequences


def assign_advantages(rollouts: list[Rollout], config: TrainConfig) -> None:
    """Set the advantage of every rollout from the rewards of its group, the rollouts of the same prompt."""
    advantages = group_advantages(
        [rollout.reward for rollout in rollouts], [rollout.prompt_id for rollout in rollouts], config.advantage
    )
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        rollout.advantage = advantage


def update_policy(
    policy: Policy, rollouts: list[Rollout], config: Config, spec: FeatureSpec | None, *, step: int
) -> tuple[dict[str, float], list[Features | None]]:
    """Train the policy on the rollouts that carry signal (collective).

    With `updates_per_step = 1` the forward pass of the update is the log-prob pass. The rollouts trained on are given
    their `policy_logprobs`, under the policy that sampled them.

    Args:
        rollouts: All rollouts of the step, in the same order on every rank.
        spec: The features that the drafter is trained on; with None, no features are kept.
        step: The RL step, which determines with `seed` the sample that the drafter learns from.

    Returns:
        The token means `loss`, `entropy`, `kl`, `corrected_fraction` and the loss's own metrics, `grad_norm` and `lr`
        (means over the updates), `num_tokens`, prompts included, `logprob_s`, the seconds of separate log-prob passes,
        and, where features are kept, `sampled_fraction`, the share of the sequences that they are of; and this rank's
        share of the features of a sample within `drafter.max_tokens_per_step`, because those of a whole step would
        fill the memory. They are the drafter's micro-batches, see `Drafter.update`.
    """
    chosen = [i for i, rollout in enumerate(rollouts) if _has_signal(rollout, config)]
    parts = _split_by_group(rollouts, chosen, config.train.updates_per_step)
    started = time.perf_counter()
    if len(parts) > 1:
        _fill_logprobs(policy, rollouts, chosen, config)
    reference = _reference_logprobs(policy, rollouts, chosen, config)
    logprob_s = time.perf_counter() - started
    metrics: dict[str, float] = {}
    features: list[Features] = []
    own = [_own_micro_batches(policy, rollouts, part, config) for part in parts]
    sample = _sample(policy, own, config, step) if spec is not None else None
    for part, batches in zip(parts, own, strict=True):
        num_tokens = sum(len(rollouts[i].response_tokens) for i in part)
        recorded: dict[int, list[float]] = {}
        loss = _loss(rollouts, reference, num_tokens, config, recorded, several=len(parts) > 1)
        windows = sample.windows if sample is not None and sample.is_divided else None
        temperature = config.sampling.temperature
        result, kept = policy.train_step(batches, loss, features=spec, windows=windows, temperature=temperature)
        features += kept
        if len(parts) == 1:
            _store_logprobs(policy, rollouts, recorded)
        for name, value in result.items():
            metrics[name] = metrics.get(name, 0.0) + value / len(parts)
    num_tokens = sum(len(rollouts[i].prompt_tokens) + len(rollouts[i].response_tokens) for i in chosen)
    metrics |= {"num_tokens": float(num_tokens), "logprob_s": logprob_s}
    if sample is None:
        return metrics, []
    num_sampled = sum(policy.ranks.gather(len(sample.windows))) / policy.model_size
    metrics["sampled_fraction"] = num_sampled / max(len(chosen), 1)
    return metrics, sample.arrange(features, chain.from_iterable(own), policy.model_rank)


def _sample(policy: Policy, own: list[list[MicroBatch]], config: Config, step: int) -> Sample:
    """Return what the drafter learns from of this data-parallel rank's micro-batches."""
    return sample_sequences(
        own,
        max_tokens=config.drafter.max_tokens_per_step,
        tokens_per_micro_batch=config.policy.tokens_per_micro_batch,
        owners=policy.model_size,
        seed=derive_seed(config.seed, "drafter's sample", step, policy.dp_rank),
    )


def align(rows: list[list[float]], mask: Tensor) -> Tensor:
    """Return each sequence's values at the True places of its row of `mask` [batch, seq], and zeros elsewhere."""
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32, device=mask.device)
    assert len(flat) == int(mask.sum()), "one value per response token"
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, flat)


def _has_signal(rollout: Rollout, config: Config) -> bool:
    return rollout.advantage != 0.0 or not config.train.drop_zero_signal_groups


def _split_by_group(rollouts: list[Rollout], chosen: list[int], parts: int) -> list[list[int]]:
    """Deal the chosen rollouts out in parts whose numbers of groups differ by at most one; no group is divided."""
    groups: dict[int, list[int]] = {}
    for index in chosen:
        groups.setdefault(rollouts[index].prompt_id, []).append(index)
    dealt = [list(groups)[part::parts] for part in range(parts)]
    return [[index for group in part for index in groups[group]] for part in dealt]


def _own_micro_batches(policy: Policy, rollouts: list[Rollout], part: list[int], config: Config) -> list[MicroBatch]:
    sequences = [TokenSequence.of(rollouts[i].prompt_tokens, rollouts[i].response_tokens, i) for i in part]
    own = deal_longest_first([len(sequence.tokens) for sequence in sequences], policy.dp_size)[policy.dp_rank]
    return pack([sequences[i] for i in own], config.policy.tokens_per_micro_batch, policy.pad_multiple)


def _loss(
    rollouts: list[Rollout],
    reference: dict[int, list[float]],
    num_tokens: int,
    config: Config,
    recorded: dict[int, list[float]],
    *,
    several: bool,
) -> LossFn:
    """Return the loss of a micro-batch as a share of the whole update's.

    Args:
        reference: Log-probs under the reference policy by rollout; empty without a KL penalty.
        num_tokens: The number of response tokens of the whole update.
        recorded: Gets the log-probs that a single update on the batch computes, by rollout.
        several: Whether this is one of several updates on the same batch.
    """

    def loss(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        rows = [rollouts[i] for i in batch.indices]
        if not several:
            recorded.update(_rows(logprobs.detach(), batch))
        targets = TokenTargets(
            advantages=align([[row.advantage] * len(row.response_tokens) for row in rows], batch.mask),
            generation_logprobs=align([row.whole_generation_logprobs for row in rows], batch.mask),
            old_logprobs=align([row.policy_logprobs or [] for row in rows], batch.mask) if several else None,
            reference_logprobs=align([reference[i] for i in batch.indices], batch.mask) if reference else None,
        )
        total, metrics = policy_loss(logprobs, entropy, batch.mask, targets, config.train)
        return total / num_tokens, {name: value / num_tokens for name, value in metrics.items()}

    return loss


def _rows(logprobs: Tensor, batch: MicroBatch) -> dict[int, list[float]]:
    """Return the log-probs of each sequence's response tokens, by the sequence's index."""
    return {i: logprobs[row][batch.mask[row]].tolist() for row, i in enumerate(batch.indices)}


def _fill_logprobs(policy: Policy, rollouts: list[Rollout], chosen: list[int], config: Config) -> None:
    """Set the rollouts' `policy_logprobs`, before several updates on one batch (collective)."""
    _store_logprobs(policy, rollouts, _logprob_pass(policy, rollouts, chosen, config))


def _logprob_pass(policy: Policy, rollouts: list[Rollout], chosen: list[int], config: Config) -> dict[int, list[float]]:
    batches = _own_micro_batches(policy, rollouts, chosen, config)
    found = policy.logprobs(batches, temperature=config.sampling.temperature)
    return {i: row for batch, logprobs in zip(batches, found, strict=True) for i, row in _rows(logprobs, batch).items()}


def _reference_logprobs(
    policy: Policy, rollouts: list[Rollout], chosen: list[int], config: Config
) -> dict[int, list[float]]:
    """Return every chosen rollout's log-probs under the reference policy; empty without a KL penalty (collective)."""
    if not config.train.kl_coef:
        return {}
    with policy.reference_weights():
        own = _logprob_pass(policy, rollouts, chosen, config)
    return {i: row for rank in policy.ranks.gather(own) for i, row in rank.items()}


def _store_logprobs(policy: Policy, rollouts: list[Rollout], own: dict[int, list[float]]) -> None:
    """Write each rank's log-probs into every rank's copy of the rollouts (collective)."""
    for rank in policy.ranks.gather(own):
        for index, row in rank.items():
            rollouts[index].policy_logprobs = row
