"""Pretraining of the drafter on more of the policy's responses than their features fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

from specrl.config import DrafterConfig
from specrl.training.batches import MicroBatch
from specrl.training.drafter.resume import TrainingCheckpoints
from specrl.training.drafter.trainer import Drafter, FeatureStream
from specrl.training.features import Features
from specrl.training.megatron.policy import Policy
from specrl.training.sample import feature_area, whole_sample


def pretrain(
    policy: Policy,
    drafter: Drafter,
    batches: list[MicroBatch],
    config: DrafterConfig,
    on_progress: Callable[[int, int], None] | None = None,
    checkpoints: TrainingCheckpoints | None = None,
) -> dict[str, float]:
    """Train the drafter for `config.epochs` on this rank's micro-batches, or measure it with 0 epochs (collective).

    Features are computed once if they fit `max_tokens_per_window` on every rank. Otherwise they are computed anew in
    each epoch, window by window, which changes no result: the policy is frozen, and the steps are the same.
    """
    lr = config.lr if config.epochs else 0.0
    spec, sample = drafter.feature_spec, whole_sample(batches, policy.model_size)
    windows_of = sample.windows if sample.is_divided else None

    def features_of(part: list[MicroBatch]) -> list[Features | None]:
        return sample.arrange(policy.forward_features(part, spec, windows_of), part, policy.model_rank)

    def stream(order: list[int]) -> Iterator[Features | None]:
        ordered = [batches[index] for index in order]
        everyone = policy.ranks.gather([feature_area(batch) for batch in ordered])
        for window in windows(everyone, config.max_tokens_per_window):
            part = ordered[window.start : window.stop]
            yield from features_of(part)  # not kept by name: it goes before the next window comes
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
