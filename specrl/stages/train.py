"""Stage `train`: the RL loop on all ranks, from the newest checkpoint on."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from specrl import lifetime, logs
from specrl.artifacts import CalibrateResult, PrepareResult, PretrainResult
from specrl.config import Config
from specrl.context import StageContext
from specrl.data.drawing import drawn_ahead
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import start_rewards
from specrl.distributed import Ranks, join, leave
from specrl.lifetime.segments import TRAIN_PROGRESS
from specrl.lineage.history import adopt_history, changes_by_step
from specrl.lineage.record import newest_step
from specrl.loop import Trainer
from specrl.precision import native
from specrl.precision.kv_scales import KvObserver
from specrl.precision.monitor import PrecisionMonitor
from specrl.precision.recipe import Recipe, check_shards, load_recipe
from specrl.progress import Progress
from specrl.rollout.bubbles.coordinator import EngineRank
from specrl.rollout.bubbles.generator import RolloutGenerator
from specrl.rollout.engine import Engine
from specrl.rollout.refit.drafter_guard import DrafterGuard, guard_requests
from specrl.rollout.refit.load import Refit
from specrl.rollout.refit.policy_probe import MAX_TOKENS, MAX_TOKENS_ALONE, RefitProbe, probe_sequences
from specrl.stages.train_results import finish
from specrl.step_record import StepRecorder
from specrl.tracking import Tracker, stage_run
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.drafter.drafters import load_drafter
from specrl.training.drafter.spot import SpotTraining
from specrl.training.drafter.trainer import Drafter
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy
from specrl.validation.stopping import EarlyStop
from specrl.validation.validation import Validation

REFITS_FILE = "refits.json"
"""The file in the stage's folder that holds the counts of its refits."""


def main(context: StageContext) -> None:
    """Run the stage in this rank; what a killed job had completed is not done again."""
    started = time.monotonic()
    lifetime.current().expect_steps()
    logs.set_up(context.config.cluster.log_level)
    ranks = join()
    with stage_run(context, ranks) as tracker, Progress(context.stage_dir, enabled=ranks.is_first) as progress:
        log_start(context, tracker)
        trainer = build(context, ranks, tracker)
        first_step = trainer.restore(context.input("pretrain", PretrainResult).rollouts_dir)
        policy_dir = context.input("prepare", PrepareResult).policy_dir
        source = trainer.generator.source
        with drawn_ahead(source, context.config, policy_dir, first_step) if ranks.is_first else nullcontext():
            last = trainer.run(first_step, progress)
        finish(context, trainer, last, tracker, time.monotonic() - started)
        trainer.shutdown()
    leave()


def log_start(context: StageContext, tracker: Tracker) -> None:
    """Tell MLflow what this stage continues, and what was changed at which step."""
    if context.continues is None:
        return
    changes = changes_by_step(context.stage_dir)
    words = "; ".join(f"step {step}: {', '.join(texts)}" for step, texts in changes.items())
    tracker.log_tags({"specrl.continues": context.continues.words, "specrl.changes": words})
    if newest_step(context.stage_dir) is not None:  # an earlier job has logged them
        return
    for step, texts in changes.items():
        tracker.log_metrics({"settings/changes": len(texts)}, step)


def build(context: StageContext, ranks: Ranks, tracker: Tracker) -> Trainer:
    """Load policy, drafter and engine of this rank, and wire up everything that the loop needs."""
    config = context.config
    if context.continues is not None:
        if ranks.is_first:
            adopt_history(context.stage_dir, context.continues)
        ranks.barrier()
    rewards = start_rewards(config, ranks.rank, config.validate_.held_out_sets if config.validate_.every else ())
    prepared = context.input("prepare", PrepareResult)
    pretrained = context.input("pretrain", PretrainResult)
    recipe = precision_recipe(context, prepared, ranks)
    check_precision(config, prepared.policy_dir)
    training = training_precision(config, recipe)
    with logs.phase("loading of the policy"):
        policy = load_policy(config, prepared.policy_dir, ranks, training)
    drafter = None
    if pretrained.drafter_dir is not None and config.speculation.draft_method.has_weights:
        drafter = load_drafter(config, pretrained.drafter_dir, prepared.policy_dir, ranks)
    with logs.phase("start of the engine"):
        engine = Engine(
            prepared.policy_dir,
            pretrained.drafter_dir,
            config=config,
            seed=config.seed,
            recipe=recipe,
            reads_policy=False,  # the first refit brings them
        )
    source = open_prompts(context, engine.tokenizer)
    spot = SpotTraining(drafter) if drafter is not None and config.bubbles.trains_drafter else None
    layers_path = context.input("calibrate", CalibrateResult).layers_path
    return Trainer(
        config=config,
        ranks=ranks,
        engine=engine,
        policy=policy,
        drafter=drafter,
        spot=spot,
        rewards=rewards,
        generator=RolloutGenerator(config, ranks, engine, source, rewards, spot),
        precision=PrecisionMonitor(config, ranks, engine, training, observe_kv_cache(config, policy), layers_path),
        refit=make_refit(context, ranks, engine, policy, drafter),
        validation=Validation(config, ranks, engine, source, rewards, tracker, context.stage_dir),
        early_stop=EarlyStop(config.train.stop_when, ranks),
        recorder=StepRecorder(ranks, tracker, context.stage_dir / "rollouts", context.stage_dir / "steps"),
        checkpoints=Checkpoints(
            context.stage_dir / TRAIN_PROGRESS,
            policy,
            Retention(config.train.keep_checkpoints, config.train.keep_every),
        ),
        lifetime=lifetime.current(),
        continues=context.continues,
    )


def open_prompts(context: StageContext, tokenizer: Any) -> PromptSource:
    """The source of the prompts; where steps count on from a checkpoint, it goes on where that stands."""
    start, begun = context.continues, (0, 0)
    if start is not None and start.counts_on:
        begun = (start.step, start.num_prompts)
    return PromptSource(context.config, tokenizer, begun, prompts_dir=context.prompts_dir)


def make_refit(context: StageContext, ranks: Ranks, engine: Engine, policy: Policy, drafter: Drafter | None) -> Refit:
    """The refit with its checks, whose probes come from the pretraining's responses."""
    config, rollouts_dir = context.config, context.input("pretrain", PretrainResult).rollouts_dir
    place = EngineRank.of(ranks, config.engine.tensor_parallel)
    own_requests = guard_requests(rollouts_dir, config)[place.engine :: place.num_engines]
    longest = MAX_TOKENS if engine.cannot_verify is None else MAX_TOKENS_ALONE
    return Refit(
        engine,
        policy,
        drafter,
        RefitProbe(probe_sequences(rollouts_dir, longest), config),
        DrafterGuard(engine, drafter, own_requests, ranks),
        ranks=ranks,
        counts_path=context.stage_dir / REFITS_FILE,
    )


def load_policy(config: Config, policy_dir: Path, ranks: Ranks, training: LinearPrecision | None) -> Policy:
    """Load this rank's shard of the policy."""
    return Policy(
        policy_dir,
        config.policy,
        dtype=config.model.dtype,
        ranks=ranks,
        seed=config.seed,
        fp8=training,
        keep_reference=config.train.kl_coef > 0,
    )


def observe_kv_cache(config: Config, policy: Policy) -> KvObserver | None:
    """Attach the observer that measures the scales of an FP8 KV cache; return None where the cache is not in FP8."""
    if config.precision.kv_cache != "fp8":
        return None
    observer = KvObserver(policy.model, policy.hf_config.num_hidden_layers, policy.ranks.device)
    policy.kv_observer = observer
    return observer


def precision_recipe(context: StageContext, prepared: PrepareResult, ranks: Ranks) -> Recipe | None:
    """Read the calibrated FP8 recipe of this policy (collective); None where nothing is in FP8."""
    if not context.config.precision.uses_fp8:
        return None
    return load_recipe(context.input("calibrate", CalibrateResult).scales_path, prepared.policy_dir, ranks)


def training_precision(config: Config, recipe: Recipe | None) -> LinearPrecision | None:
    """The FP8 arithmetic of the trainer's linear layers; None where they compute in the model's own type."""
    if recipe is None or config.precision.training == "bf16":
        return None
    return LinearPrecision(recipe.bf16_layers, power_of_two=recipe.power_of_two)


def check_precision(config: Config, policy_dir: Path) -> None:
    """Refuse FP8 that this device or this layout does not have, before any weights are read.

    Raises:
        ValueError: The message is one line that names the key.
    """
    precision, hf = config.precision, AutoConfig.from_pretrained(policy_dir)
    if precision.training == "fp8":
        native.check_training(hf, precision)
    if precision.generation == precision.training == "fp8":
        check_shards(hf, config.policy.tensor_parallel, config.engine.tensor_parallel)
