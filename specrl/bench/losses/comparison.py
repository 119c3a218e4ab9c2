"""Compare ways of training an EAGLE-3 drafter on the same responses, by what an engine then accepts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specrl.artifacts import SpeedPair
from specrl.bench.drafter.observed import micro_batches
from specrl.bench.job import say
from specrl.bench.settings import LossSettings
from specrl.bench.subject import Subject
from specrl.config import Config, DrafterConfig, PrecisionConfig
from specrl.data.problems import Prompt, derive_seed
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks
from specrl.models.directory import read_model_config
from specrl.models.sources import load_tokenizer
from specrl.rollout.collect import Origin, collect, make_request
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine
from specrl.rollout.matched import matched_pair
from specrl.rollout.vllm.engine.arguments import gpu_memory
from specrl.training.drafter.trainer import Drafter, choose_draft_vocabulary, count_tokens
from specrl.training.megatron.policy import Policy

SPEED_REQUESTS = 8
"""The least number of requests in a matched pair."""


@dataclass(frozen=True)
class LossResult:
    """One drafter, trained in one way with one seed."""

    variant: str
    """Its settings, as in `LossSettings.variants`."""
    drafter: DrafterConfig
    """All of its settings."""
    seed: int
    training_s: float
    """The seconds of its training, without those of the policy's features."""
    stats: SpeculationStats
    """What the engine drafted and accepted in held-out responses of natural length."""
    pairs: list[SpeedPair]
    """The matched pairs, one for each batch size."""

    def rows(self, config: Config) -> list[dict[str, Any]]:
        """Return the figures as rows for `--json`, one for each batch size."""
        return [
            {
                "drafter": f"{self.variant}, seed {self.seed}",
                "kind": "eagle3",
                "layers": self.drafter.num_layers,
                "loss": self.drafter.loss.name,
                "k": config.speculation.k,
                "temperature": config.sampling.temperature,
                "batch": pair.batch,
                "acceptance_length": self.stats.acceptance_length,
                "acceptance_rate_per_pos": list(self.stats.acceptance_rate_per_pos),
                "speedup": pair.speedup,
                "variant": self.variant,
                "seed": self.seed,
                "training_s": self.training_s,
            }
            for pair in self.pairs
        ]


class LossComparison:
    """The policy of a run before RL, on one rank, and its engines, which draft with one drafter after another.

    There is one for drafters of all positions in one pass, one for the others, and both only if there are both.
    """

    def __init__(self, subject: Subject, settings: LossSettings, ranks: Ranks, folder: Path) -> None:
        """Start the engines.

        Args:
            folder: The folder for a drafter of another kind than the run's, for its engine to start with.
        """
        self.settings, self.ranks = settings, ranks
        self.config = comparison_config(subject.config)
        self.policy_dir = subject.first_policy_dir
        tokenizer = load_tokenizer(self.policy_dir)
        self.source = PromptSource(self.config, tokenizer, problems_dir=self.config.problems_dir)
        variants = [settings.drafter_config(variant, self.config.drafter) for variant in settings.variants]
        kinds = sorted({variant.parallel for variant in variants})
        self.engines = {parallel: self._engine(subject, parallel, 1 / len(kinds), folder) for parallel in kinds}
        self.policy = Policy(
            self.policy_dir,
            self.config.policy,
            dtype=self.config.model.dtype,
            ranks=ranks,
            trainable=False,
            seed=self.config.seed,
        )

    def _engine(self, subject: Subject, parallel: bool, share: float, folder: Path) -> Engine:
        """Start the engine of a kind of drafters, with the run's own drafter, or with a new one of the other kind.

        Args:
            share: The share of the GPU memory for engines that this one takes.
            folder: The folder for the new drafter.
        """
        config, drafter = self.config, self.config.drafter
        overrides = gpu_memory(share * config.engine.gpu_memory_fraction)
        directory = subject.first_drafter_dir
        if parallel != drafter.parallel:
            directory, other = folder, drafter.model_copy(update={"parallel": parallel})
            tokens = torch.arange(min(drafter.draft_vocab_size, read_model_config(self.policy_dir)["vocab_size"]))
            Drafter.create(self.policy_dir, other, tokens, self.ranks).save(directory, policy_version=0)
        return Engine(self.policy_dir, directory, config=config, seed=config.seed, overrides=overrides)

    def shutdown(self) -> None:
        """Stop the engines."""
        for engine in self.engines.values():
            engine.shutdown()

    def run(self, seed: int) -> Iterator[LossResult]:
        """Train a drafter for each variant on the same responses and measure it, one after another.

        The seed is that of the responses, of what is random in a new drafter, and of the order of its training.
        """
        drafter = self.config.drafter
        count = self.settings.num_prompts or drafter.num_prompts
        samples = self.settings.samples_per_prompt or drafter.samples_per_prompt
        origin = Origin(derive_seed(self.config.seed, "losses", seed), step=0)
        prompts = self.source.pretraining(count)
        kind = drafter.parallel if drafter.parallel in self.engines else not drafter.parallel
        engine = self.engines[kind]  # responses are the same whatever drafts; the run's own drafter saves time
        rollouts = collect(engine, prompts, samples, self.config, None, origin).scored()[0]
        counts = count_tokens([rollout.response_tokens for rollout in rollouts], self.policy.vocab_size)
        draft_tokens = choose_draft_vocabulary(counts, drafter.draft_vocab_size)
        new = [
            Drafter.create(
                self.policy_dir, self.settings.drafter_config(variant, drafter), draft_tokens, self.ranks, seed
            )
            for variant in self.settings.variants
        ]
        batches = micro_batches(rollouts, drafter.tokens_per_micro_batch)
        features = self.policy.forward_features(batches, new[0].feature_spec)
        held_out = self.source.held_out(self.settings.num_held_out)
        for variant, own in zip(self.settings.variants, new, strict=True):
            started = time.monotonic()
            own.update(features, lr=own.config.lr, epochs=own.config.epochs)
            result = self._measure(variant, seed, own, held_out, time.monotonic() - started)
            speeds = ", ".join(f"batch {pair.batch} {pair.speedup:.2f}x" for pair in result.pairs)
            length = result.stats.acceptance_length
            say(f"seed {seed}, {variant}: {length:.2f} tokens, {speeds}; trained in {result.training_s:.0f} s")
            yield result

    def _measure(
        self, variant: str, seed: int, drafter: Drafter, held_out: list[Prompt], training_s: float
    ) -> LossResult:
        """Measure a drafter on held-out prompts; their responses are the same for all drafters and seeds."""
        engine = self.engines[drafter.config.parallel]
        engine.refit_drafter(drafter.named_weights())
        k, origin = self.config.speculation.k, Origin(derive_seed(self.config.seed, "held out"), step=0)
        engine.set_k(k)
        stats = collect(engine, held_out, 1, self.config, None, origin).generation.stats
        pairs = []
        for batch in self.settings.batches:
            chosen = range(max(batch, SPEED_REQUESTS))
            requests = [
                make_request(held_out[i % len(held_out)], i // len(held_out), self.config, origin) for i in chosen
            ]
            pairs.append(matched_pair(engine, requests, batch, k, self.settings.repeats))
        return LossResult(variant, drafter.config, seed, training_s, stats, pairs)


def comparison_config(config: Config) -> Config:
    """Return the run's configuration in BF16, with drafts as long as those of the drafter's training."""
    speculation = config.speculation.model_copy(update={"k": config.drafter.ttt_steps, "adaptive": False})
    return config.model_copy(update={"speculation": speculation, "precision": PrecisionConfig()})
