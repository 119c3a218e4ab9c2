"""Drafters that are observed side by side on one RL run.

Rollouts do not depend on the drafter, so one run serves any number of drafters: how many of their drafts would have
been accepted follows from the stored responses and the features of the policy that sampled them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from specrl.config import Config
from specrl.distributed import Ranks
from specrl.schemas import Rollout
from specrl.training.batches import MicroBatch, TokenSequence, pack
from specrl.training.drafter import pretraining
from specrl.training.drafter.trainer import Drafter, choose_draft_vocabulary, count_tokens
from specrl.training.features import Features, FeatureSpec
from specrl.training.megatron.policy import Policy
from specrl.training.sample import even_sample

Training = Literal["frozen", "zeroed", "one step behind", "online"]
"""How a drafter's weights follow a run: they stay as they were pretrained, they are all zero, they are what the trained
ones were a step before, or they are trained in every step."""


@dataclass
class ObservedDrafter:
    """A drafter that follows the run without drafting for it."""

    source: str
    """The name of the data that it was pretrained on."""
    training: Training
    """How its weights follow the run."""
    drafter: Drafter
    online_one: ObservedDrafter | None = None
    """For a drafter that is a step behind, the one that is trained."""
    lengths: list[float] = field(default_factory=list)
    """The acceptance length on each step's responses, before it is trained on them."""

    @property
    def name(self) -> str:
        """The data that it was pretrained on, and how it is trained, in words."""
        return f"{self.source}, {self.training}"

    def follow(self, features: list[Features], config: Config) -> None:
        """Measure the drafter on a step's features, and then let its weights follow.

        One that is a step behind must follow before the one that is trained.
        """
        self.lengths.append(self.drafter.update(features, lr=0.0)["acceptance_length"])
        if self.online_one is not None:
            self.drafter.model.load_state_dict(self.online_one.drafter.model.state_dict())
        if self.training == "online":
            areas, limit = [item.tokens.numel() for item in features], config.drafter.max_tokens_per_step
            chosen = even_sample(areas, 0.5, lambda part: sum(areas[i] for i in part) <= limit) if features else []
            self.drafter.update([features[index] for index in chosen], lr=config.drafter.online_lr)


def pretrain(policy: Policy, rollouts: Sequence[Rollout], config: Config, ranks: Ranks, epochs: int) -> Drafter:
    """Return a new drafter, trained on the policy's responses as in the pretrain stage."""
    counts = count_tokens([rollout.response_tokens for rollout in rollouts], policy.vocab_size)
    draft_tokens = choose_draft_vocabulary(counts, config.drafter.draft_vocab_size)
    drafter = Drafter.create(policy.model_dir, config.drafter, draft_tokens, ranks, config.seed)
    settings = config.drafter.model_copy(update={"epochs": epochs})
    pretraining.pretrain(policy, drafter, micro_batches(rollouts, settings.tokens_per_micro_batch), settings)
    return drafter


def frozen_and_online(
    source: str, directory: Path, policy_dir: Path, config: Config, ranks: Ranks, *, stale: bool = False
) -> list[ObservedDrafter]:
    """Return the drafter in `directory` frozen, and last an equal one that will be trained online.

    Args:
        stale: Whether to return, between the two, one whose weights are all zero and one that is always a step behind
            the last.
    """

    def load(training: Training) -> ObservedDrafter:
        drafter = Drafter.load(directory, policy_dir, config.drafter, ranks, seed=config.seed)
        return ObservedDrafter(source, training, drafter)

    frozen, online = load("frozen"), load("online")
    if not stale:
        return [frozen, online]
    zeroed, behind = load("zeroed"), load("one step behind")
    with torch.no_grad():
        for parameter in zeroed.drafter.model.parameters():
            parameter.zero_()
    behind.online_one = online
    return [frozen, zeroed, behind, online]


def micro_batches(rollouts: Sequence[Rollout], tokens: int) -> list[MicroBatch]:
    """Pack responses as the engine drafts them: it does not draft the last token of one that the length limit cut off.

    Args:
        tokens: The largest number of tokens of a micro-batch, where a prompt counts for each of its responses.
    """
    sequences = []
    for index, rollout in enumerate(rollouts):
        drafted = rollout.response_tokens[: -1 if rollout.finish_reason == "length" else None]
        if drafted:
            sequences.append(TokenSequence.of(rollout.prompt_tokens, drafted, index))
    return pack(sequences, tokens, counts_repeated=True)


def common_spec(drafters: Sequence[Drafter]) -> FeatureSpec:
    """Return the features that all drafters need, so that one pass of the policy serves their draft vocabularies."""
    layers = drafters[0].feature_spec.layers
    assert all(drafter.feature_spec.layers == layers for drafter in drafters)
    tokens = {token for drafter in drafters for token in drafter.draft_tokens.tolist()}
    return FeatureSpec(layers, torch.tensor(sorted(tokens), dtype=torch.int64))


def narrow(features: list[Features], spec: FeatureSpec, drafter: Drafter) -> list[Features]:
    """Return the part of the common features that one drafter needs."""
    columns = torch.searchsorted(spec.draft_tokens, drafter.draft_tokens.cpu())
    return [replace(item, targets=item.targets[..., columns]) for item in features]
