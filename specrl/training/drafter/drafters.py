"""Creating, loading, pretraining and writing the drafter that `speculation.method` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path

from transformers import AutoConfig

from specrl.config import Config, DrafterConfig
from specrl.distributed import Ranks, sum_arrays
from specrl.schemas import Rollout
from specrl.training.batches import MicroBatch
from specrl.training.drafter.kinds.mtp import Mtp
from specrl.training.drafter.resume import TrainingCheckpoints
from specrl.training.drafter.trainer import Drafter, FeatureStream, choose_draft_vocabulary, count_tokens
from specrl.training.features import Features
from specrl.training.megatron.policy import Policy
from specrl.training.sample import feature_area, whole_sample


def new_drafter(
    config: Config, policy_dir: Path, responses: Sequence[Rollout], ranks: Ranks, source_dir: Path | None = None
) -> Drafter:
    """The drafter that pretraining starts from: the policy's layer, `drafter.source`, or a new one (collective).

    EAGLE-3's draft vocabulary is chosen from the responses of all ranks; this rank passes its own.
    """
    if config.speculation.draft_method.is_policy_layer:
        return Drafter.of_policy(policy_dir, config.drafter, ranks, config.seed)
    if source_dir is not None:
        return Drafter.load(source_dir, policy_dir, config.drafter, ranks, config.seed)
    vocab_size = AutoConfig.from_pretrained(policy_dir).vocab_size
    counts = sum_arrays(ranks, count_tokens([response.sampled_tokens for response in responses], vocab_size))
    draft_tokens = choose_draft_vocabulary(counts, config.drafter.draft_vocab_size)
    return Drafter.create(policy_dir, config.drafter, draft_tokens, ranks, config.seed)


def load_drafter(config: Config, drafter_dir: Path, policy_dir: Path, ranks: Ranks) -> Drafter:
    if config.speculation.draft_method.is_policy_layer:
        return Drafter.of_policy(drafter_dir, config.drafter, ranks, config.seed)
    return Drafter.load(drafter_dir, policy_dir, config.drafter, ranks, config.seed)


def save_drafter(drafter: Drafter, policy: Policy, directory: Path, policy_version: int) -> None:
    """Write an EAGLE-3 directory, or the whole policy with its multi-token-prediction layer (collective)."""
    if isinstance(drafter.model, Mtp):
        policy.save_pretrained(directory, drafter.named_weights())
    elif policy.ranks.is_first:
        drafter.save(directory, policy_version)


def save_policy(
    policy: Policy, drafter: Drafter | None, policy_dir: Path, drafter_dir: Path, version: int
) -> Path | None:
    """Write policy and drafter; return the drafter's directory, which a policy's own layer shares (collective)."""
    if drafter is not None and isinstance(drafter.model, Mtp):
        save_drafter(drafter, policy, policy_dir, version)
        return policy_dir
    policy.save_pretrained(policy_dir)
    if drafter is None:
        return None
    save_drafter(drafter, policy, drafter_dir, version)
    return drafter_dir


def pretrain(
    policy: Policy,
    drafter: Drafter,
    batches: list[MicroBatch],
    config: DrafterConfig,
    on_progress: Callable[[int, int], None] | None = None,
    checkpoints: TrainingCheckpoints | None = None,
) -> dict[str, float]:
    """Train the drafter for `config.epochs` on this rank's micro-batches, or measure it with 0 epochs (collective).

    Features are computed once if they fit `max_tokens_per_window` on every rank. Otherwise they are recomputed in each
    epoch, window by window, which changes no result: the policy is frozen, and the steps are the same.
    """
    lr = config.lr if config.epochs else 0.0
    sample = whole_sample(batches, policy.model_size)

    def features_of(part: list[MicroBatch]) -> list[Features | None]:
        found = policy.forward_features(part, drafter.feature_layers, sample.kept)
        return sample.arrange(found, part, policy.model_rank)

    def stream(order: list[int]) -> Iterator[Features | None]:
        ordered = [batches[index] for index in order]
        everyone = policy.ranks.gather([feature_area(batch) for batch in ordered])
        for window in windows(everyone, config.max_tokens_per_window):
            part = ordered[window.start : window.stop]
            yield from features_of(part)  # not bound to a name, so that it is freed before the next window
            yield from repeat(None, len(window) - len(part))

    area = max(policy.ranks.gather(sum(feature_area(batch) for batch in batches)))
    fit = area <= config.max_tokens_per_window
    features = features_of(batches) if fit else FeatureStream(len(batches), stream)
    return drafter.update(features, lr=lr, epochs=config.epochs, on_progress=on_progress, checkpoints=checkpoints)


def windows(areas: Sequence[Sequence[int]], max_tokens: int) -> list[range]:
    """Cut an epoch's steps where a rank's padded tokens, `areas[rank][step]`, would exceed `max_tokens`."""
    found: list[range] = []
    start, held = 0, [0] * len(areas)
    num_steps = max(len(own) for own in areas)
    for step in range(num_steps):
        new = [own[step] if step < len(own) else 0 for own in areas]
        if step > start and max(a + b for a, b in zip(held, new, strict=True)) > max_tokens:
            found.append(range(start, step))
            start, held = step, [0] * len(areas)
        held = [a + b for a, b in zip(held, new, strict=True)]
    return [*found, range(start, num_steps)] if num_steps else []
