"""Stage `train`: the RL loop on all ranks, from the newest checkpoint on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from transformers import AutoConfig

from specrl import lifetime, logs
from specrl.artifacts import (
    CalibrateResult,
    PrecisionReport,
    PrepareResult,
    PretrainResult,
    TrainResult,
    write_result,
)
from specrl.config import Config
from specrl.context import StageContext
from specrl.data.prompts import PromptSource
from specrl.data.reward_pool import start_rewards
from specrl.distributed import Ranks, join, leave
from specrl.lineage.history import adopt_history, changes_by_step
from specrl.loop import Trainer
from specrl.models.sources import load_tokenizer
from specrl.precision import native
from specrl.precision.kv_scales import KvObserver
from specrl.precision.monitor import PrecisionMonitor
from specrl.precision.recipe import RECIPE_FILE, Recipe, check_shards, load_recipe, write_recipe
from specrl.progress import Progress
from specrl.rollout.bubbles.generator import RolloutGenerator
from specrl.rollout.drafts.curve import write_curve
from specrl.rollout.engine import Engine
from specrl.rollout.refit.drafter_guard import DrafterGuard, guard_requests
from specrl.rollout.refit.load import Refit
from specrl.rollout.refit.policy_probe import RefitProbe, probe_sequences
from specrl.segments import TRAIN_PROGRESS
from specrl.step_record import StepRecorder, mean_of, read_steps, step_seconds_median, timing_share, total_stats
from specrl.tracking import Tracker, stage_run
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.drafter.drafters import load_drafter, save_policy
from specrl.training.drafter.spot import SpotTraining
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy
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
        trainer.run(first_step, progress)
        finish(context, trainer, tracker, time.monotonic() - started)
        trainer.shutdown()
    leave()


def log_start(context: StageContext, tracker: Tracker) -> None:
    """Tell MLflow what this stage continues, and what was changed at which step."""
    if context.continues is None:
        return
    changes = changes_by_step(context.stage_dir)
    words = "; ".join(f"step {step}: {', '.join(texts)}" for step, texts in changes.items())
    tracker.log_tags({"specrl.continues": context.continues.words, "specrl.changes": words})
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
    recipe = precision_recipe(context, prepared)
    check_precision(config, prepared.policy_dir)
    training = training_precision(config, recipe)
    with logs.phase("loading of the policy"):
        policy = load_policy(config, prepared.policy_dir, ranks, training)
    drafter = None
    if pretrained.drafter_dir is not None and config.speculation.draft_method.has_weights:
        drafter = load_drafter(config, pretrained.drafter_dir, prepared.policy_dir, ranks)
    with logs.phase("start of the engine"):
        engine = Engine(prepared.policy_dir, pretrained.drafter_dir, config=config, seed=config.seed, recipe=recipe)
    source = PromptSource(config, load_tokenizer(prepared.policy_dir))
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
        refit=Refit(
            engine,
            policy,
            drafter,
            RefitProbe(probe_sequences(pretrained.rollouts_dir), config),
            DrafterGuard(engine, drafter, guard_requests(pretrained.rollouts_dir, config), ranks),
            ranks=ranks,
            verify_every=config.engine.verify_every,
            counts_path=context.stage_dir / REFITS_FILE,
        ),
        validation=Validation(config, ranks, engine, source, rewards, tracker, context.stage_dir),
        recorder=StepRecorder(ranks, tracker, context.stage_dir / "rollouts", context.stage_dir / "steps"),
        checkpoints=Checkpoints(
            context.stage_dir / TRAIN_PROGRESS,
            policy,
            Retention(config.train.keep_checkpoints, config.train.keep_every),
        ),
        lifetime=lifetime.current(),
        continues=context.continues,
    )


def load_policy(config: Config, policy_dir: Path, ranks: Ranks, training: LinearPrecision | None) -> Policy:
    """Load this rank's shard of the policy."""
    return Policy(
        policy_dir,
        config.policy,
        dtype=config.model.dtype,
        ranks=ranks,
        num_updates=config.train.num_updates,
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


def precision_recipe(context: StageContext, prepared: PrepareResult) -> Recipe | None:
    """Read the calibrated FP8 recipe of this policy; None where nothing is in FP8."""
    if not context.config.precision.uses_fp8:
        return None
    return load_recipe(context.input("calibrate", CalibrateResult).scales_path, prepared.policy_dir)


def training_precision(config: Config, recipe: Recipe | None) -> LinearPrecision | None:
    """Return the FP8 arithmetic of the trainer's linear layers; None where they compute in the model's own type."""
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


def finish(context: StageContext, trainer: Trainer, tracker: Tracker, seconds: float) -> None:
    """Save policy and drafter where the next stages look for them; write the result file last."""
    policy_dir, steps = context.stage_dir / "policy", trainer.config.train.num_steps
    with logs.phase("writing of policy and drafter"):
        drafter_dir = save_policy(trainer.policy, trainer.drafter, policy_dir, context.stage_dir / "drafter", steps)
    if not trainer.ranks.is_first:
        return
    recipe = trainer.engine.precision.recipe
    if recipe is not None:
        write_recipe(policy_dir / RECIPE_FILE, recipe, policy_dir)
    tracker.log_rollouts(trainer.recorder.rollouts_dir, "rollouts")
    if trainer.engine.controller is not None:
        tracker.log_artifact(write_curve(context.stage_dir, context.config, trainer.engine.controller.curve()))
    result = train_result(trainer, policy_dir, drafter_dir, seconds)
    tracker.log_params({f"precision_{name}": value for name, value in result.precision.model_dump().items()})
    write_result(context.stage_dir, result)


def train_result(trainer: Trainer, policy_dir: Path, drafter_dir: Path | None, seconds: float) -> TrainResult:
    """Return the result of the stage, summed up from the records of its steps."""
    records = read_steps(trainer.recorder.steps_dir)
    stats = total_stats(records)
    return TrainResult(
        policy_dir=policy_dir,
        drafter_dir=drafter_dir,
        steps=len(records),
        step_seconds_median=step_seconds_median(records),
        timing_share=timing_share(records),
        reward_first=records[0].metrics["reward/mean"],
        reward_last=records[-1].metrics["reward/mean"],
        acceptance_length=stats.acceptance_length,
        acceptance_rate_per_pos=list(stats.acceptance_rate_per_pos),
        mismatch=mean_of(records, "mismatch"),
        precision=precision_report(trainer),
        refit_checks=trainer.refit.counts.checks,
        refit_failures=trainer.refit.counts.failures,
        drafter_events=[event for record in records for event in record.events],
        refit_max_abs_logprob_diff=max(record.metrics["refit/max_abs_logprob_diff"] for record in records),
        seconds=seconds,
    )


def precision_report(trainer: Trainer) -> PrecisionReport:
    """Return the precision that each engine was asked for, and how it really computed."""
    recipe, config = trainer.engine.precision.recipe, trainer.config.precision
    unquantised = {"bfloat16": "bf16", "float32": "fp32"}[trainer.config.model.dtype]

    def name(asked: Literal["bf16", "fp8"]) -> str:
        return "fp8" if asked == "fp8" else unquantised

    return PrecisionReport(
        generation=name(config.generation),
        generation_mode=trainer.engine.mode,
        training=name(config.training),
        training_mode=trainer.precision.training_mode,
        kv_cache=name(config.kv_cache),
        fp8_layers=len(recipe.fp8_layers) if recipe is not None else 0,
        bf16_layers=sorted(recipe.bf16_layers) if recipe is not None else [],
    )
