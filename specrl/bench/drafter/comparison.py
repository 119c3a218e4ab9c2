"""Compare EAGLE-3 drafters, pretrained on and off the task, frozen and trained online, on one RL run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from specrl.artifacts import SpeedPair
from specrl.bench.drafter.instructions import instructions
from specrl.bench.drafter.observed import (
    ObservedDrafter,
    common_spec,
    frozen_and_online,
    micro_batches,
    narrow,
    pretrain,
)
from specrl.bench.job import say
from specrl.bench.settings import DrafterSettings
from specrl.bench.subject import Subject
from specrl.config import Config, PrecisionConfig
from specrl.data.problems import Prompt, derive_seed
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import RewardPool
from specrl.distributed import Ranks
from specrl.models.sources import load_tokenizer
from specrl.rollout.collect import Origin, collect, make_request
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.drafts.outcome_log import counters
from specrl.rollout.engine import Engine
from specrl.rollout.matched import matched_pair
from specrl.schemas import Rollout
from specrl.training.drafter.trainer import Drafter
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch
from specrl.training.update import update_policy

SPEED_REQUESTS = 8
"""The least number of requests in a matched pair."""


@dataclass(frozen=True)
class DrafterResult:
    """One drafter at the end of the run."""

    drafter: ObservedDrafter
    pairs: list[SpeedPair]
    """The matched pairs under the last policy, one for each batch size."""
    drafts: list[SpeculationStats]
    """The counters of the drafts of each pair."""

    def rows(self, config: Config) -> list[dict[str, Any]]:
        """Return the figures as rows for `--json`, one for each batch size.

        Args:
            config: The configuration under which the drafters were compared.
        """
        return [
            {
                "drafter": self.drafter.name,
                "kind": "eagle3",
                "layers": self.drafter.drafter.shape.num_layers,
                "loss": config.drafter.loss.name,
                "k": config.drafter.ttt_steps,
                "temperature": config.sampling.temperature,
                "batch": pair.batch,
                "acceptance_length": stats.acceptance_length,
                "acceptance_rate_per_pos": list(stats.acceptance_rate_per_pos),
                "speedup": pair.speedup,
                "pretrained_on": self.drafter.source,
                "online": self.drafter.training == "online",
                "training": self.drafter.training,
                "acceptance_length_by_step": self.drafter.lengths,
            }
            for pair, stats in zip(self.pairs, self.drafts, strict=True)
        ]


class DrafterComparison:
    """One RL run on one rank with the drafters beside it; the engine drafts with the last of them.

    The pretrained drafters stay in `folder`, so that `specrl bench bubbles --drafter` can begin with one.
    """

    def __init__(self, subject: Subject, settings: DrafterSettings, ranks: Ranks, folder: Path) -> None:
        self.settings, self.ranks, self.folder = settings, ranks, folder
        self.config = comparison_config(subject.config, settings)
        self.policy_dir = subject.first_policy_dir
        tokenizer = load_tokenizer(self.policy_dir)
        self.source = PromptSource(self.config, tokenizer, problems_dir=self.config.problems_dir)
        self.rewards = RewardPool(self.config.data)
        # The engine starts with the run's own drafter, and each refit replaces its weights. It keeps the shape and the
        # feature layers of that drafter, which is loaded here to check that it has those of the present configuration.
        assert subject.first_drafter_dir is not None
        Drafter.load(subject.first_drafter_dir, self.policy_dir, self.config.drafter, ranks)
        self.engine = Engine(self.policy_dir, subject.first_drafter_dir, config=self.config, seed=self.config.seed)
        self.engine.set_k(self.engine.longest_k)  # so that acceptance is measured at one draft length
        self.policy = Policy(
            self.policy_dir,
            self.config.policy,
            dtype=self.config.model.dtype,
            ranks=ranks,
            num_updates=self.config.train.num_updates,
            seed=self.config.seed,
            keep_reference=self.config.train.kl_coef > 0,
        )
        self.drafters: list[ObservedDrafter] = []

    def pretrain(self) -> None:
        """Pretrain one drafter for each source, on the policy's responses to its prompts."""
        for source in self.settings.sources:
            prompts = prompts_of(source, self.settings.num_prompts, self.config, self.source)
            started = time.monotonic()
            rollouts = self._answer(prompts, source)
            drafter = pretrain(self.policy, rollouts, self.config, self.ranks, self.settings.epochs)
            drafter.save(self.folder / source, policy_version=0)
            stale = self.settings.stale and source == self.settings.sources[-1]
            found = frozen_and_online(
                source, self.folder / source, self.policy_dir, self.config, self.ranks, stale=stale
            )
            self.drafters += found
            tokens = sum(len(rollout.response_tokens) for rollout in rollouts)
            say(f"drafter {source}: {len(rollouts)} responses, {tokens} tokens, {time.monotonic() - started:.0f} s")

    def _answer(self, prompts: list[Prompt], stream: str) -> list[Rollout]:
        self.engine.set_k(0)
        origin = Origin(derive_seed(self.config.seed, stream), step=0)
        return collect(self.engine, prompts, 1, self.config, None, origin).scored()[0]

    def run(self) -> list[float]:
        """Run the RL steps and return each one's acceptance length, as the engine counted it with the last drafter."""
        drafters = [observed.drafter for observed in self.drafters]
        spec = common_spec(drafters)
        counted = []
        self.refit(self.drafters[-1], version=0)
        self.engine.set_k(self.config.drafter.ttt_steps)
        for step in range(self.settings.num_steps):
            started = time.monotonic()
            rollouts, length = self._step_rollouts(step)
            counted.append(length)
            features = self.policy.forward_features(
                micro_batches(rollouts, self.config.policy.tokens_per_micro_batch), spec
            )
            for observed in self.drafters:
                observed.follow(narrow(features, spec, observed.drafter), self.config)
            update_policy(self.policy, self._batch(rollouts), self.config, None, step=step)
            self.refit(self.drafters[-1], version=step + 1)
            words = ", ".join(f"{observed.name} {observed.lengths[-1]:.2f}" for observed in self.drafters)
            reward = fmean(rollout.reward for rollout in rollouts)
            say(f"step {step}: reward {reward:.2f}; {words}; {time.monotonic() - started:.0f} s")
        return counted

    def _step_rollouts(self, step: int) -> tuple[list[Rollout], float]:
        origin = Origin(self.config.seed, step, policy_version=step, drafter_version=step)
        prompts = self.source.batch(step)
        samples = self.settings.samples_per_prompt
        unscored = collect(self.engine, prompts, samples, self.config, self.rewards, origin)
        return unscored.scored()[0], unscored.generation.stats.acceptance_length

    def _batch(self, rollouts: list[Rollout]) -> RolloutBatch:
        batch = RolloutBatch.gather(self.ranks, rollouts)
        batch.assign_advantages(self.config.train)
        return batch

    def refit(self, observed: ObservedDrafter, version: int) -> None:
        """Give the engine the current policy and this drafter, and every drafter what it shares with the policy."""
        self.engine.refit(self._weights(), observed.drafter.named_weights(), version=version)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.policy.hf_weights():
            for observed in self.drafters:
                observed.drafter.share(name, tensor)
            yield name, tensor

    def speedups(self) -> list[DrafterResult]:
        """Measure matched pairs for each drafter under the last policy, on held-out prompts."""
        origin = Origin(derive_seed(self.config.seed, "speed"), step=0)
        largest = max(SPEED_REQUESTS, *self.settings.batches)
        prompts = self.source.held_out(min(largest, self.config.validate_.num_prompts))
        results = []
        for observed in self.drafters:
            self.refit(observed, version=self.settings.num_steps)
            pairs, drafts = [], []
            for batch in self.settings.batches:
                chosen = range(max(batch, SPEED_REQUESTS))
                requests = [
                    make_request(prompts[i % len(prompts)], i // len(prompts), self.config, origin) for i in chosen
                ]
                k = self.config.drafter.ttt_steps
                with self.engine.log_drafts() as log:
                    pairs.append(matched_pair(self.engine, requests, batch, k, self.settings.repeats))
                drafts.append(counters(log.drafts))
            results.append(DrafterResult(observed, pairs, drafts))
            say(f"{observed.name}: " + ", ".join(f"batch {pair.batch} {pair.speedup:.2f}x" for pair in pairs))
        return results


def prompts_of(source: str, count: int, config: Config, prompts: PromptSource) -> list[Prompt]:
    """Return the prompts of a source of pretraining: `off-task`, `task`, or `both` with half of each."""
    of_task = {"off-task": 0, "task": count, "both": count // 2}[source]
    return [*instructions(config, prompts.tokenizer, count - of_task), *prompts.pretraining(of_task)]


def comparison_config(config: Config, settings: DrafterSettings) -> Config:
    """Return the run's configuration in BF16 with the benchmark's sizes and drafts as long as in training."""
    train = config.train.model_copy(
        update={
            "num_steps": settings.num_steps,
            "prompts_per_step": settings.prompts_per_step,
            "samples_per_prompt": settings.samples_per_prompt,
        }
    )
    speculation = config.speculation.model_copy(update={"k": config.drafter.ttt_steps, "adaptive": False})
    return config.model_copy(update={"train": train, "speculation": speculation, "precision": PrecisionConfig()})
