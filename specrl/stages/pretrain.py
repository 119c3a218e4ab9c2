"""Stage `pretrain`: the policy answers the task's prompts, and the drafter learns to predict those answers."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import fmean

from specrl import lifetime, logs
from specrl.artifacts import PrepareResult, PretrainResult, write_result
from specrl.config import Config
from specrl.context import StageContext
from specrl.data.problems import Prompt, derive_seed
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import FailureTally, RewardPool, refuse_failure, start_rewards
from specrl.distributed import Ranks
from specrl.lineage.record import Continuation
from specrl.models.sources import load_tokenizer
from specrl.progress import Progress
from specrl.rollout.collect import Origin, Unscored, collect, deal, open_asked
from specrl.rollout.engine import Engine
from specrl.schemas import Rollout, read_rollouts, rollout_path, write_rollouts
from specrl.stages.rank import stage_rank
from specrl.tracking.tracker import Tracker
from specrl.training.batches import pack
from specrl.training.checkpoint.load import load_drafter_state
from specrl.training.drafter.drafters import load_drafter, new_drafter, pretrain, save_drafter
from specrl.training.drafter.resume import TrainingCheckpoints
from specrl.training.megatron.policy import Policy
from specrl.training.rollouts import RolloutBatch
from specrl.training.shares import TrainingShares

DATA_FOLDER = "drafter-data"
"""The folder, inside the stage's, of the responses to prompts of `drafter.data`."""


def main(context: StageContext) -> None:
    started = time.monotonic()
    with stage_rank(context) as (ranks, tracker, progress):
        rollouts_dir = context.stage_dir / "rollouts"
        own = answer_prompts(context, ranks, rollouts_dir, progress)
        rollouts = RolloutBatch.gather(ranks, own, data=context.config.data)
        drafter_dir = context.stage_dir / "drafter" if context.config.speculation.draft_method.has_weights else None
        metrics: dict[str, float] = {}
        start = context.continues
        if drafter_dir is not None and start is not None and start.has_drafter:
            take_drafter(context, start, ranks, drafter_dir)
        elif drafter_dir is not None:
            lessons = rollouts
            if context.config.drafter.data is not None:
                path = rollout_path(context.stage_dir / DATA_FOLDER, 0, ranks.rank)
                lessons = RolloutBatch.gather(ranks, [*own, *(read_rollouts(path) if path.exists() else [])])
            metrics = pretrain_drafter(context, ranks, lessons, drafter_dir, tracker, progress)
        rewards = rollouts.rewards.tolist()
        if ranks.is_first:
            tracker.log_rollouts(rollouts_dir, "pretraining-rollouts")
            tracker.log_metrics({"pretrain/num_responses": len(rewards), "pretrain/reward_mean": fmean(rewards)})
            result = PretrainResult(
                drafter_dir=drafter_dir,
                rollouts_dir=rollouts_dir,
                num_responses=len(rewards),
                reward_mean=fmean(rewards),
                top1_match=metrics.get("top1_match"),
                seconds=time.monotonic() - started,
            )
            write_result(context.stage_dir, result)


def answer_prompts(context: StageContext, ranks: Ranks, rollouts_dir: Path, progress: Progress) -> list[Rollout]:
    """The responses of this rank's engine, only on its first rank (collective).

    They are generated, or read if a killed job with equally many engines had finished all of them.
    """
    size = context.config.engine.tensor_parallel
    first = ranks.rank // size * size
    path = rollout_path(rollouts_dir, 0, first)
    wanted = {rollout_path(rollouts_dir, 0, rank) for rank in range(0, ranks.world_size, size)}
    found = set(rollouts_dir.glob("step=*/rank-*.arrow"))
    # Engines start and generate together: if one's responses are missing, all generate theirs again. The same holds if
    # a job with another number of engines distributed the prompts differently.
    if any(ranks.gather(found != wanted)):
        if ranks.is_first:
            for other in (*found, *(context.stage_dir / DATA_FOLDER).glob("step=*/rank-*.arrow")):
                other.unlink()
        ranks.barrier()
        rollouts = generate(context, ranks, progress)
        if ranks.rank == first:
            write_rollouts(path, rollouts)
    return read_rollouts(path) if ranks.rank == first else []


def generate(context: StageContext, ranks: Ranks, progress: Progress) -> list[Rollout]:
    """The responses of this rank's engine to its share of the prompts, with rewards on its first rank.

    Responses to the prompts of `drafter.data` are generated too; they earn no rewards and are written at once.
    """
    config = context.config
    rewards = start_rewards(config, ranks.rank)
    policy_dir = context.input("prepare", PrepareResult).policy_dir
    source = PromptSource(config, load_tokenizer(policy_dir), prompts_dir=context.prompts_dir)
    size = config.engine.tensor_parallel
    engines, own = ranks.world_size // size, ranks.rank // size
    prompts = source.pretraining(config.drafter.num_prompts)
    with logs.phase("start of the engine"):
        engine = Engine(policy_dir, None, config=config, seed=config.seed, speculate=False, alone=True)

    def answer(config: Config, prompts: list[Prompt], rewards: RewardPool | None, purpose: str, phase: str) -> Unscored:
        asked = open_asked(engine, deal(prompts, config.drafter.samples_per_prompt, own, engines), config, rewards)
        origin = Origin(derive_seed(config.seed, purpose), step=0, rank=ranks.rank)
        on_progress = partial(progress.update, unit="response", phase=phase)
        return collect(engine, asked, config, rewards, origin, on_progress=on_progress)

    with logs.phase("generation"):
        rollouts, scores = answer(config, prompts, rewards, "pretrain", "answering task prompts").scored()
        if config.drafter.data is not None and config.speculation.draft_method.has_weights:
            others = answer(
                config.updated(environment={"name": None}),  # which covers only the task
                source.drafter_data(config.drafter.data_prompts),
                None,
                "drafter-data",
                "answering drafter.data",
            )
            if ranks.rank == own * size:
                write_rollouts(rollout_path(context.stage_dir / DATA_FOLDER, 0, ranks.rank), others.scored()[0])
    tallies = ranks.gather((FailureTally.of(scores.failures), len(rollouts)))[::size]  # one per engine
    failures = FailureTally.merge(tally for tally, _ in tallies)
    refuse_failure(failures, sum(count for _, count in tallies), config.data, config.environment.name)
    if rewards is not None:
        rewards.close()
    engine.shutdown()
    return rollouts


def take_drafter(context: StageContext, start: Continuation, ranks: Ranks, drafter_dir: Path) -> None:
    config = context.config
    policy_dir = context.input("prepare", PrepareResult).policy_dir
    with logs.phase("loading of the checkpoint"):
        policy = frozen_policy(config, policy_dir, ranks)
        drafter = load_drafter(config, start.stage_dir / "drafter", policy_dir, ranks)
        load_drafter_state(start.checkpoint_dir, drafter)
        save_drafter(drafter, policy, drafter_dir, policy_version=0)


def pretrain_drafter(
    context: StageContext, ranks: Ranks, rollouts: RolloutBatch, drafter_dir: Path, tracker: Tracker, progress: Progress
) -> dict[str, float]:
    """Train the drafter on the features of the policy's responses and write its directory (collective).

    With `drafter.epochs = 0` it is only measured on them. A policy's multi-token-prediction layer starts from its
    current weights, and its directory holds the whole policy. May raise LeftJobError between two steps.
    """
    config = context.config
    prepared = context.input("prepare", PrepareResult)
    policy_dir = prepared.policy_dir
    with logs.phase("loading of the policy"):
        policy = frozen_policy(config, policy_dir, ranks)
    drafter = new_drafter(config, policy_dir, list(rollouts.held.values()), ranks, prepared.drafter_dir)
    shares = TrainingShares.of(policy, rollouts, [list(range(len(rollouts)))])
    own = shares.deliver(rollouts)
    sequences = [own[number] for number in shares.own(0)]
    batches = pack(sequences, config.drafter.tokens_per_micro_batch, policy.pad_multiple, counts_repeated=True)
    progress.update(0, 1, phase="features of the policy")
    checkpoints = TrainingCheckpoints(context.stage_dir / "training", batches, ranks, lifetime.current())
    with logs.phase("training of the drafter"):
        metrics = pretrain(
            policy,
            drafter,
            batches,
            config.drafter,
            partial(progress.update, unit="step", phase="training the drafter"),
            checkpoints,
        )
    tracker.log_metrics({f"drafter/{name}": value for name, value in metrics.items()}, 0)
    save_drafter(drafter, policy, drafter_dir, policy_version=0)
    checkpoints.finish()
    return metrics


def frozen_policy(config: Config, policy_dir: Path, ranks: Ranks) -> Policy:
    return Policy(policy_dir, config.policy, dtype=config.model.dtype, ranks=ranks, trainable=False, seed=config.seed)
