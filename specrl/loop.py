"""The RL loop: synchronous GRPO whose rollouts are speculative and exact.

Read `run_loop` top to bottom: that is a step. Everything in it is collective over the ranks of the train stage; each
rank holds an engine, its shard of the policy, and the drafter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from specrl import logs
from specrl.artifacts import write_text
from specrl.config import Config
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks
from specrl.precision.gate import check_agreement
from specrl.precision.kv_scales import KvObserver
from specrl.precision.recipe import KvScales
from specrl.progress import Progress
from specrl.report.gantt import gantt
from specrl.rollout.bubbles.balance import ResponseLengthEstimator, deal
from specrl.rollout.bubbles.bubbles import Bubbles
from specrl.rollout.collect import Origin, Reward, collect
from specrl.rollout.drafts.acceptance import SpeculationStats, over_engines
from specrl.rollout.engine import Engine
from specrl.rollout.refit.drafter_guard import DrafterGuard, GuardReport
from specrl.rollout.refit.parity import ParityReport
from specrl.rollout.refit.policy_probe import RefitProbe
from specrl.schemas import Rollout, rollout_path, write_rollouts
from specrl.step_record import StepRecord, controller_metrics, mismatch_of, part_metrics, step_metrics, write_step
from specrl.timeline import Bubble, Pace, RankTimeline, Timer, bubble_metrics, rank_spans
from specrl.tracking import Tracker
from specrl.training.drafter.spot import SpotTraining
from specrl.training.drafter.trainer import Drafter
from specrl.training.features import Features
from specrl.training.megatron import checkpoint
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy
from specrl.training.update import assign_advantages, update_policy


@dataclass(frozen=True)
class Trainer:
    """The parts of one rank that the loop puts to work."""

    config: Config
    ranks: Ranks
    policy: Policy
    precision: LinearPrecision | None
    """FP8 in the trainer; none in BF16."""
    kv_observer: KvObserver | None
    """Measures the scales of an FP8 KV cache; none with a BF16 one."""
    layers_path: Path
    """The calibration's table of layers, for whoever must see where the engines disagree."""
    drafter: Drafter | None
    engine: Engine
    source: PromptSource
    expected: ResponseLengthEstimator
    bubbles: Bubbles
    spot: SpotTraining | None
    """Where idle ranks train the drafter."""
    reward: Reward
    probe: RefitProbe
    guard: DrafterGuard
    tracker: Tracker
    rollouts_dir: Path
    steps_dir: Path
    checkpoint_dir: Path


def run_loop(trainer: Trainer, first_step: int, progress: Progress) -> None:
    """Run the steps from `first_step` on; what a kill interrupts is redone by the next call, with the same result."""
    config = trainer.config
    refit(trainer, version=first_step)
    is_checked = False
    for step in range(first_step, config.train.num_steps):
        timer = Timer()
        with logs.step(step), timer("step"):
            with timer("generation"):
                rollouts, speculation, bubbles = generate(trainer, step)
                if config.engine.sleep:
                    trainer.engine.sleep()
            with timer("policy_update"):
                policy_metrics, features = update(trainer, rollouts)
                is_checked = is_checked or check_quantised(trainer, policy_metrics["num_tokens"])
                kv_scales = measure_kv_scales(trainer, timer)
            mismatch = agreement(trainer, rollouts)
            with timer("drafter_update"):
                drafter_metrics = update_drafter(trainer, features)
            del features  # or the next step's would come beside them
            with timer("refit"):
                parity, guard = refit(trainer, version=step + 1, kv_scales=kv_scales)
            with timer("checkpoint"):
                parts = (policy_metrics, drafter_metrics, mismatch, bubble_metrics(bubbles))
                metrics = step_metrics(rollouts, speculation, *parts, parity, guard, timer.seconds)
                metrics |= {**controller_metrics(trainer.engine.controller), **trainer.bubbles.metrics()}
                # Until all ranks' are gathered, after the checkpoint, the parts of each are taken to be this one's.
                ranks = [RankTimeline(bubble, rank_spans(bubble, timer.spans)) for bubble in bubbles]
                record = StepRecord.of(step, metrics, speculation, ranks, trainer.guard.take_events())
                store(trainer, record, rollouts)
        metrics |= part_metrics(timer.seconds)
        log(trainer, replace(record, metrics=metrics, ranks=timelines(trainer, bubbles, timer)), progress)


def generate(trainer: Trainer, step: int) -> tuple[list[Rollout], SpeculationStats, list[Bubble]]:
    """The step's rollouts, all ranks' of them on every rank in prompt order, with rewards and advantages."""
    config, ranks = trainer.config, trainer.ranks
    size = config.engine.tensor_parallel
    prompts = trainer.source.batch(step)
    share = deal(prompts, trainer.expected, ranks.world_size // size)[ranks.rank // size]
    trainer.bubbles.open(share)
    origin = Origin(config.seed, step, ranks.rank, policy_version=step, drafter_version=step)
    started_at, samples = time.time(), config.train.samples_per_prompt
    pace = Pace(len(share) * samples, config.engine.max_num_seqs)

    def on_iteration() -> None:
        trainer.bubbles.beat()
        pace.on_iteration()

    own, generation = collect(
        trainer.engine,
        share,
        samples,
        config,
        trainer.reward,
        origin,
        on_progress=pace.on_progress,
        on_iteration=on_iteration,
        recall=True,
    )
    bubble, texts = trainer.bubbles.spend(step, started_at, generation, pace.rows())
    parts = ranks.gather((own, generation.stats, bubble, texts))
    stats = over_engines([stats for _, stats, _, _ in parts[::size]])
    bubbles = [bubble for _, _, bubble, _ in parts]
    trainer.bubbles.close(bubbles, [texts for *_, texts in parts], stats)
    order = {prompt.id: place for place, prompt in enumerate(prompts)}
    rollouts = sorted(
        (rollout for own, *_ in parts[::size] for rollout in own), key=lambda item: (order[item.prompt_id], item.sample)
    )
    trainer.expected.learn(prompts, ((rollout.prompt_id, len(rollout.response_tokens)) for rollout in rollouts))
    assign_advantages(rollouts, config.train)
    return rollouts, stats, bubbles


def update(trainer: Trainer, rollouts: list[Rollout]) -> tuple[dict[str, float], list[Features]]:
    """Train the policy on the step's rollouts; what its forward pass shows of it is kept for the drafter."""
    spec = trainer.drafter.feature_spec if trainer.drafter else None
    return update_policy(trainer.policy, rollouts, trainer.config, spec)


def check_quantised(trainer: Trainer, num_tokens: float) -> bool:
    """That engine and trainer computed FP8 where they should: silently off, it would go unnoticed for ever.

    Args:
        num_tokens: that the step trained on.

    Returns:
        Whether everything was checked: a trainer that was given no token has computed nothing yet.

    Raises:
        NotQuantisedError: naming the first layer that computed in another precision.
    """
    trainer.engine.assert_quantised()
    if trainer.precision is not None and num_tokens:
        trainer.precision.assert_quantised(trained=True)
    return trainer.precision is None or num_tokens > 0


def measure_kv_scales(trainer: Trainer, timer: Timer) -> KvScales | None:
    """Of the step's own tokens; none with a BF16 KV cache, or where nothing was trained on: the old ones stay."""
    found = trainer.kv_observer.take(trainer.ranks) if trainer.kv_observer is not None else None
    if found is None:
        return None
    scales, timer.scattered["kv_scales"] = found
    return scales


def agreement(trainer: Trainer, rollouts: list[Rollout]) -> dict[str, float]:
    """How far generation and training agree about the tokens trained on; a run that lost its agreement ends here."""
    metrics = mismatch_of(rollouts)
    limit = trainer.config.precision.max_token_mult_prob_error
    check_agreement(metrics, limit, trainer.layers_path)
    return metrics


def update_drafter(trainer: Trainer, features: list[Features]) -> dict[str, float]:
    """Train the drafter on the features of the policy's own forward pass; they carry no gradient (invariant 3).

    Where idle ranks train it, what they learnt is brought together instead; all train now when none was idle.
    """
    drafter, config, spot = trainer.drafter, trainer.config.drafter, trainer.spot
    if drafter is None:
        return {}
    metrics = spot.merge() if spot is not None else {}
    if not metrics:
        metrics = drafter.update(features, lr=config.online_lr)
    if spot is not None:
        spot.remember(features)
    return metrics


def refit(trainer: Trainer, version: int, kv_scales: KvScales | None = None) -> tuple[ParityReport, GuardReport]:
    """Give the engine the new policy and drafter, then check that it has them (invariant 4).

    A policy that did not arrive ends the run; a drafter that did not, or that is no longer accepted, is replaced.
    """
    drafter = trainer.drafter
    trainer.engine.wake()
    drafter_weights = drafter.named_weights() if drafter is not None else None
    trainer.engine.refit(weights_for_engine(trainer), drafter_weights, version=version, kv_scales=kv_scales)
    parity, guard = trainer.probe.check(trainer.engine, trainer.policy), trainer.guard.check(version)
    if drafter is not None and guard.speculating:
        trainer.bubbles.probed(guard.acceptance_length)
    return parity, guard


def weights_for_engine(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """The policy's tensors; on their way the drafter, too, gets those that it shares with the policy."""
    for name, tensor in trainer.policy.hf_weights():
        if trainer.drafter is not None:
            trainer.drafter.share(name, tensor)
        yield name, tensor


def store(trainer: Trainer, record: StepRecord, rollouts: list[Rollout]) -> None:
    """Rollouts of this rank as Arrow, then, when due, a checkpoint from which the next step can start.

    Before that the record is written with the times so far: after the checkpoint the step is not run again, and a kill
    before its final record would leave none.
    """
    config, ranks, step = trainer.config.train, trainer.ranks, record.step
    own = [rollout for rollout in rollouts if rollout.rank == ranks.rank]
    write_rollouts(rollout_path(trainer.rollouts_dir, step, ranks.rank), own)
    if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.num_steps:
        keep(trainer, record)
        parts, scales = (trainer.policy, trainer.drafter), trainer.engine.precision.kv_scales
        checkpoint.save(trainer.checkpoint_dir, *parts, step + 1, keep=config.keep_checkpoints, kv_scales=scales)


def timelines(trainer: Trainer, bubbles: list[Bubble], timer: Timer) -> list[RankTimeline]:
    """What every rank did in this step, and when."""
    spans = trainer.ranks.gather(timer.spans)
    return [RankTimeline(bubble, rank_spans(bubble, own)) for bubble, own in zip(bubbles, spans, strict=True)]


def keep(trainer: Trainer, record: StepRecord) -> None:
    """One file per step, so that a restarted stage knows its past, and its picture."""
    if trainer.ranks.is_first:
        write_step(trainer.steps_dir, record)
        write_text(picture_path(trainer, record), gantt(record.ranks))


def picture_path(trainer: Trainer, record: StepRecord) -> Path:
    return trainer.steps_dir / f"step={record.step:06d}.svg"


def log(trainer: Trainer, record: StepRecord, progress: Progress) -> None:
    """The step's final record; MLflow; and the line that people watch."""
    keep(trainer, record)
    if trainer.ranks.is_first:
        trainer.tracker.log_artifact(picture_path(trainer, record), "gantt")
    trainer.tracker.log_metrics(record.metrics, record.step)
    trainer.tracker.flush()
    text = "reward {reward/mean:.3f}, acceptance length {spec/acceptance_length:.2f}, {timing/step_s:.1f} s"
    message = "; ".join([text.format(**record.metrics), *record.events])
    progress.update(record.step + 1, trainer.config.train.num_steps, message=message, unit="step", phase="RL")
