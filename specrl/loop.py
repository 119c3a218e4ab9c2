"""The RL loop: synchronous GRPO whose rollouts are speculative and exact.

Read `run_loop` top to bottom: that is a step. Everything in it is collective over the ranks of the train stage; each
rank holds an engine, its shard of the policy, and the drafter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from specrl.config import Config
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks
from specrl.precision.fp8 import LinearPrecision
from specrl.progress import Progress
from specrl.rollout.acceptance import SpeculationStats, over_engines
from specrl.rollout.collect import Origin, Reward, collect
from specrl.rollout.engine import Engine
from specrl.rollout.parity import ParityReport
from specrl.rollout.probe import RefitProbe
from specrl.schemas import Rollout, rollout_path, write_rollouts
from specrl.steps import StepRecord, step_metrics, write_step
from specrl.tracking import Tracker
from specrl.training import checkpoint
from specrl.training.advantages import group_advantages
from specrl.training.drafter import Drafter
from specrl.training.features import Features
from specrl.training.policy import Policy
from specrl.training.update import update_policy


@dataclass
class Timer:
    """Wall time of the named parts of a step, seconds."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started


@dataclass(frozen=True)
class Trainer:
    """The parts of one rank that the loop puts to work."""

    config: Config
    ranks: Ranks
    policy: Policy
    precision: LinearPrecision | None
    """FP8 in the trainer; none in BF16."""
    drafter: Drafter | None
    engine: Engine
    source: PromptSource
    reward: Reward
    probe: RefitProbe
    tracker: Tracker
    rollouts_dir: Path
    steps_dir: Path
    checkpoint_dir: Path


def run_loop(trainer: Trainer, first_step: int, progress: Progress) -> None:
    """Run the steps from `first_step` on; what a kill interrupts is redone by the next call, with the same result."""
    config = trainer.config
    refit(trainer, version=first_step)
    for step in range(first_step, config.train.num_steps):
        timer = Timer()
        with timer("step"):
            with timer("generation"):
                rollouts, speculation = generate(trainer, step)
            with timer("policy_update"):
                policy_metrics, features = update(trainer, rollouts, is_first=step == first_step)
            with timer("drafter_update"):
                drafter_metrics = update_drafter(trainer, features)
            with timer("refit"):
                parity = refit(trainer, version=step + 1)
            with timer("checkpoint"):
                store(trainer, step, rollouts)
        cap = config.train.importance_cap
        record = step_metrics(step, rollouts, speculation, policy_metrics, drafter_metrics, parity, timer.seconds, cap)
        log(trainer, step, record, progress)


def generate(trainer: Trainer, step: int) -> tuple[list[Rollout], SpeculationStats]:
    """The step's rollouts, all ranks' of them on every rank in prompt order, with rewards and advantages."""
    config, ranks = trainer.config, trainer.ranks
    prompts = trainer.source.batch(step)
    size = config.engine.tensor_parallel
    engine, engines = ranks.rank // size, ranks.world_size // size
    origin = Origin(config.seed, step, ranks.rank, policy_version=step, drafter_version=step)
    own, generation = collect(
        trainer.engine, prompts[engine::engines], config.train.samples_per_prompt, config, trainer.reward, origin
    )
    shares = ranks.gather((own, generation.stats))[::size]
    order = {prompt.id: place for place, prompt in enumerate(prompts)}
    rollouts = sorted(
        (rollout for share, _ in shares for rollout in share), key=lambda item: (order[item.prompt_id], item.sample)
    )
    advantages = group_advantages(
        [rollout.reward for rollout in rollouts],
        [rollout.prompt_id for rollout in rollouts],
        normalize_by_std=config.train.normalize_by_std,
    )
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        rollout.advantage = advantage
    return rollouts, over_engines([stats for _, stats in shares])


def update(trainer: Trainer, rollouts: list[Rollout], *, is_first: bool) -> tuple[dict[str, float], list[Features]]:
    """Train the policy on the step's rollouts; what its forward pass shows of it is kept for the drafter."""
    spec = trainer.drafter.feature_spec if trainer.drafter else None
    metrics, features = update_policy(trainer.policy, rollouts, trainer.config, spec)
    if is_first and trainer.precision is not None and metrics["num_tokens"]:
        trainer.precision.assert_quantised(trained=True)  # FP8 that is silently off would go unnoticed for ever
    return metrics, features


def update_drafter(trainer: Trainer, features: list[Features]) -> dict[str, float]:
    """Train the drafter on the features of the policy's own forward pass; they carry no gradient (invariant 3)."""
    drafter, config = trainer.drafter, trainer.config.drafter
    if drafter is None:
        return {}
    return drafter.update(within_budget(features, config.max_tokens_per_step), lr=config.online_lr)


def within_budget(features: list[Features], max_tokens: int) -> list[Features]:
    """The first micro-batches whose padded area stays within `max_tokens`; they come longest sequences first."""
    kept: list[Features] = []
    total = 0
    for item in features:
        total += item.tokens.numel()
        if total > max_tokens and kept:
            break
        kept.append(item)
    return kept


def refit(trainer: Trainer, version: int) -> ParityReport:
    """Give the engine the new policy and drafter, then check that it has them (invariant 4)."""
    drafter = trainer.drafter
    trainer.engine.refit(
        weights_for_engine(trainer), drafter.named_weights() if drafter is not None else None, version=version
    )
    return trainer.probe.check(trainer.engine, trainer.policy, drafter)


def weights_for_engine(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """The policy's tensors; on their way the drafter, too, gets the embeddings that it shares with the policy."""
    for name, tensor in trainer.policy.hf_weights():
        if name == "model.embed_tokens.weight" and trainer.drafter is not None:
            trainer.drafter.set_embeddings(tensor)
        yield name, tensor


def store(trainer: Trainer, step: int, rollouts: list[Rollout]) -> None:
    """Rollouts of this rank as Arrow, then, when due, a checkpoint from which the next step can start."""
    config, ranks = trainer.config.train, trainer.ranks
    own = [rollout for rollout in rollouts if rollout.rank == ranks.rank]
    write_rollouts(rollout_path(trainer.rollouts_dir, step, ranks.rank), own)
    if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.num_steps:
        checkpoint.save(trainer.checkpoint_dir, trainer.policy, trainer.drafter, step + 1, keep=config.keep_checkpoints)


def log(trainer: Trainer, step: int, record: StepRecord, progress: Progress) -> None:
    """One file per step, so that a restarted stage knows its past; MLflow; and the line that people watch."""
    if trainer.ranks.is_first:
        write_step(trainer.steps_dir, record)
    trainer.tracker.log_metrics(record.metrics, step)
    trainer.tracker.flush()
    text = "reward {reward/mean:.3f}, acceptance length {spec/acceptance_length:.2f}, {timing/step_s:.1f} s"
    progress.update(
        step + 1, trainer.config.train.num_steps, message=text.format(**record.metrics), unit="step", phase="RL"
    )
