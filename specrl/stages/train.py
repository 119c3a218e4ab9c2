"""Stage `train`: the RL loop on all ranks from the newest checkpoint, then the final and the best policy."""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from specrl import lifetime, logs
from specrl.artifacts import (
    BestPolicy,
    CalibrateResult,
    PrecisionReport,
    PrepareResult,
    PretrainResult,
    TrainResult,
    write_result,
)
from specrl.config import Config, ConfigError
from specrl.context import StageContext
from specrl.data.drawing import drawn_ahead
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import start_rewards
from specrl.distributed import Ranks
from specrl.events import read_events, record_event
from specrl.lifetime.segments import TRAIN_PROGRESS
from specrl.lineage.history import adopt_history, changes_by_step, kept_checkpoints
from specrl.loop import Trainer
from specrl.metrics import OF_PARTS
from specrl.models.directory import read_model_config
from specrl.models.layout import check_teacher, fp8_problems
from specrl.models.shapes import shape_of
from specrl.models.sources import materialise_model
from specrl.precision import native
from specrl.precision.kv_scales import KvObserver
from specrl.precision.recipe import RECIPE_FILE, Recipe, load_recipe, write_recipe
from specrl.rollout.bubbles.coordinator import EngineRank
from specrl.rollout.bubbles.generator import RolloutGenerator
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine
from specrl.rollout.refit.drafter_guard import DrafterGuard, guard_requests
from specrl.rollout.refit.load import Refit
from specrl.rollout.refit.policy_probe import MAX_TOKENS, RefitProbe, probe_sequences
from specrl.stages.rank import stage_rank
from specrl.step_record import StepRecord, StepRecorder, mean_of, read_steps, timing_share
from specrl.tracking.tracker import Tracker
from specrl.training import lora
from specrl.training.checkpoint.checkpoints import Checkpoints, Retention
from specrl.training.checkpoint.load import load
from specrl.training.checkpoint.manifest import CheckpointError
from specrl.training.drafter.drafters import load_drafter, save_policy
from specrl.training.drafter.spot import SpotTraining
from specrl.training.drafter.trainer import Drafter
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy
from specrl.validation.precision import PrecisionMonitor
from specrl.validation.speed import write_next_step
from specrl.validation.stopping import EarlyStop
from specrl.validation.validation import Validation


def main(context: StageContext) -> None:
    """Run the stage in this rank, without redoing what a killed job had completed."""
    started = time.monotonic()
    lifetime.current().expect_steps()
    with stage_rank(context) as (ranks, tracker, progress):
        if context.continues is not None:
            changes = changes_by_step(context.stage_dir)
            words = "; ".join(f"step {step}: {', '.join(texts)}" for step, texts in changes.items())
            tracker.log_tags({"specrl.continues": context.continues.words, "specrl.changes": words})
        progress.update(0, 1, phase="loading of policy and engine")
        trainer = build(context, ranks, tracker)
        first_step = trainer.restore()
        policy_dir = context.input("prepare", PrepareResult).policy_dir
        source = trainer.generator.source
        with drawn_ahead(source, context.config, policy_dir, first_step) if ranks.is_first else nullcontext():
            last = trainer.run(first_step, progress)
        finish(context, trainer, last, tracker, time.monotonic() - started)
        trainer.shutdown()


def build(context: StageContext, ranks: Ranks, tracker: Tracker) -> Trainer:
    """Load this rank's policy, drafter and engine, and set up everything that the loop needs."""
    config = context.config
    if context.continues is not None:
        if ranks.is_first:
            adopt_history(context.stage_dir, context.continues)
        ranks.barrier()
    rewards = start_rewards(config, ranks.rank, config.validate_.held_out_sets if config.validate_.every else ())
    prepared = context.input("prepare", PrepareResult)
    pretrained = context.input("pretrain", PretrainResult)
    recipe, training = fp8_of(context, prepared.policy_dir, ranks)
    with logs.phase("loading of the policy"):
        policy = load_policy(config, prepared.policy_dir, ranks, training)
    teacher = load_teacher(context, prepared.policy_dir, ranks)
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
            reads_policy=False,  # the first refit provides them
        )
    start = context.continues  # if step numbers continue from a checkpoint, so do the prompts
    begun = (start.step, start.num_prompts) if start is not None and start.counts_on else (0, 0)
    source = PromptSource(config, engine.tokenizer, begun, prompts_dir=context.prompts_dir)
    spot = SpotTraining(drafter) if drafter is not None and config.bubbles.trains_drafter else None
    layers_path = context.input("calibrate", CalibrateResult).layers_path
    return Trainer(
        config=config,
        ranks=ranks,
        engine=engine,
        policy=policy,
        teacher=teacher,
        drafter=drafter,
        spot=spot,
        rewards=rewards,
        generator=RolloutGenerator(config, ranks, engine, source, rewards, spot),
        precision=PrecisionMonitor(config, ranks, engine, training, policy.kv_observer, layers_path),
        refit=make_refit(context, ranks, engine, policy, drafter),
        validation=Validation(config, ranks, engine, source, rewards, tracker, context.stage_dir),
        early_stop=EarlyStop(config.train.stop_when, ranks, begun[0]),
        recorder=StepRecorder(ranks, tracker, context.stage_dir / "rollouts", context.stage_dir / "steps"),
        checkpoints=Checkpoints(
            context.stage_dir / TRAIN_PROGRESS,
            policy,
            Retention(config.train.keep_checkpoints, config.train.keep_every),
        ),
        lifetime=lifetime.current(),
        continues=context.continues,
    )


def make_refit(context: StageContext, ranks: Ranks, engine: Engine, policy: Policy, drafter: Drafter | None) -> Refit:
    config, rollouts_dir = context.config, context.input("pretrain", PretrainResult).rollouts_dir
    place = EngineRank.of(ranks, config.engine.tensor_parallel)
    own_requests = guard_requests(rollouts_dir, config)[place.engine :: place.num_engines]
    return Refit(
        engine,
        policy,
        drafter,
        RefitProbe(probe_sequences(rollouts_dir, MAX_TOKENS), config),
        DrafterGuard(engine, drafter, own_requests, ranks),
        ranks,
    )


def load_policy(config: Config, policy_dir: Path, ranks: Ranks, training: LinearPrecision | None) -> Policy:
    policy = Policy(
        policy_dir,
        config.policy,
        dtype=config.model.dtype,
        ranks=ranks,
        seed=config.seed,
        fp8=training,
        keep_reference=config.train.kl_coef > 0,
        stores_reference=config.train.renews_reference,
    )
    if config.precision.kv_cache == "fp8":
        policy.kv_observer = KvObserver(policy.model, policy.hf_config.num_hidden_layers, ranks.device)
    return policy


def load_teacher(context: StageContext, policy_dir: Path, ranks: Ranks) -> Policy | None:
    """Load the frozen model of `train.teacher` (collective): in `model.dtype`, in the policy's layout, never in FP8."""
    config, source = context.config, context.config.train.teacher
    if source is None:
        return None
    directory, model = context.stage_dir / "teacher", config.model.model_copy(update={"source": str(source.absolute())})
    with logs.phase("loading of the teacher"):
        if ranks.is_first:
            check_teacher(config, policy_dir)
            shutil.rmtree(directory, ignore_errors=True)  # an earlier start may have had another teacher
            materialise_model(model, config.seed, directory)
        ranks.barrier()
        dtype, seed = config.model.dtype, config.seed
        return Policy(directory, config.policy, dtype=dtype, ranks=ranks, seed=seed, trainable=False)


def fp8_of(context: StageContext, policy_dir: Path, ranks: Ranks) -> tuple[Recipe | None, LinearPrecision | None]:
    """The policy's calibrated recipe and the trainer's FP8 layers; None if nothing is in FP8 (collective).

    Raises ValueError, before any weights are read, for FP8 that this device or layout does not support.
    """
    config, precision = context.config, context.config.precision
    if not precision.uses_fp8:
        return None, None
    shape = shape_of(read_model_config(policy_dir))
    if problems := list(fp8_problems(config, shape, on_gpu=torch.cuda.is_available())):  # for a model from the hub
        raise ConfigError("\n".join(problems))
    if precision.training == "fp8":
        native.check_training()
    recipe = load_recipe(context.input("calibrate", CalibrateResult).scales_path, policy_dir, ranks)
    if precision.training == "bf16":
        return recipe, None
    return recipe, LinearPrecision(recipe.bf16_layers)


BEST_FOLDER = "best"
"""The folder, inside the stage's, of the best policy with its drafter."""


def finish(context: StageContext, trainer: Trainer, last: int, tracker: Tracker, seconds: float) -> None:
    """Save the policy after `last` steps and the best one, with their drafters, and finally the result (collective)."""
    folder, records = context.stage_dir, read_steps(trainer.recorder.steps_dir)
    write_next_step(folder, last, trainer.ranks, trainer.generator, trainer.engine)
    with logs.phase("writing of policy and drafter"):
        policy_dir, drafter_dir = write_policy(trainer, folder, last)
        best = write_best(context, trainer, last)
    if not trainer.ranks.is_first:
        return
    reason, events = trainer.early_stop.reason, read_events(folder)
    if reason is not None and all(event.text != reason for event in events):
        record_event(folder, "early stop", reason, step=last)
    tracker.log_rollouts(trainer.recorder.rollouts_dir, "rollouts")
    taken = best if best is not None and context.config.train.final == "best" else None
    result = TrainResult(
        policy_dir=taken.policy_dir if taken else policy_dir,
        drafter_dir=taken.drafter_dir if taken else drafter_dir,
        policy_step=taken.step if taken else last,
        steps=len(records),
        stopped_early=reason,
        best=best,
        **sum_up(records),
        drafter_events=(collapses := [event.text for event in events if event.kind == "drafter"]),
        refit_failures=len(collapses),
        precision=precision_report(trainer),
        seconds=seconds,
    )
    tracker.log_params({f"precision_{name}": value for name, value in result.precision.model_dump().items()})
    write_result(folder, result)


def write_policy(trainer: Trainer, folder: Path, version: int) -> tuple[Path, Path | None]:
    policy_dir = folder / "policy"
    drafter_dir = save_policy(trainer.policy, trainer.drafter, policy_dir, folder / "drafter", version)
    recipe = trainer.engine.precision.recipe
    trainer.policy.save_adapter(folder / lora.FOLDER)
    if trainer.ranks.is_first and recipe is not None:
        write_recipe(policy_dir / RECIPE_FILE, recipe, policy_dir)
    return policy_dir, drafter_dir


def write_best(context: StageContext, trainer: Trainer, last: int) -> BestPolicy | None:
    """Write the best policy among the existing checkpoints; None if nothing was validated (collective).

    The trainer holds that policy afterwards.
    """
    folder, metric = context.stage_dir / BEST_FOLDER, context.config.best_metric
    best = load_best(context.stage_dir, trainer, last)
    if best is None or metric is None:
        return None
    step, value = best
    if trainer.ranks.is_first:
        shutil.rmtree(folder, ignore_errors=True)
    trainer.ranks.barrier()
    policy_dir, drafter_dir = write_policy(trainer, folder, step)
    return BestPolicy(step=step, metric=metric, value=value, policy_dir=policy_dir, drafter_dir=drafter_dir)


def load_best(stage_dir: Path, trainer: Trainer, last: int) -> tuple[int, float] | None:
    """Load the best policy, held by the trainer or in a complete checkpoint; return step and value (collective).

    Damaged checkpoints are skipped and recorded as events.
    """
    kept = trainer.ranks.gather(kept_checkpoints(stage_dir))[0]
    while (best := trainer.validation.best(among={*kept, last})) is not None and best[0] != last:
        try:
            state = load(kept[best[0]], trainer.policy, trainer.drafter)
        except CheckpointError as error:
            del kept[best[0]]
            if trainer.ranks.is_first:
                record_event(stage_dir, "checkpoint", f"the best policy so far is lost: {error}", best[0])
            continue
        trainer.engine.precision.restore(state.kv_scales)
        break
    return best


def sum_up(records: list[StepRecord]) -> dict[str, Any]:
    stats = SpeculationStats.merge(record.stats for record in records)
    first, last = records[0].metrics, records[-1].metrics
    parts = [name for name in first if name.startswith(OF_PARTS) and name in last]
    return {
        "step_seconds_median": median(record.metrics["timing/step_s"] for record in records),
        "timing_share": timing_share(records),
        "reward_first": first["reward/mean"],
        "reward_last": last["reward/mean"],
        "reward_parts": {name.removeprefix(OF_PARTS): (first[name], last[name]) for name in parts},
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate_per_pos": list(stats.acceptance_rate_per_pos),
        "mismatch": mean_of(records, "mismatch"),
        "refit_checks": 1 + len(records),
        "refit_max_abs_logprob_diff": max(record.metrics["refit/max_abs_logprob_diff"] for record in records),
    }


def precision_report(trainer: Trainer) -> PrecisionReport:
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
