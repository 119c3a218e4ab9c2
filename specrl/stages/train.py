"""Stage `train`: the RL loop on all ranks, from the last complete step on."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from transformers import AutoConfig

from specrl import logs
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
from specrl.data.rewards import make_reward
from specrl.distributed import Ranks, join, leave
from specrl.loop import Trainer, run_loop
from specrl.models.sources import load_tokenizer
from specrl.precision import native
from specrl.precision.kv_scales import KvObserver
from specrl.precision.recipe import RECIPE_FILE, Recipe, check_shards, load_recipe, write_recipe
from specrl.progress import Progress
from specrl.rollout.bubbles.balance import WINDOW, ResponseLengthEstimator, stored_lengths
from specrl.rollout.bubbles.bubbles import Bubbles
from specrl.rollout.drafts.curve import write_curve
from specrl.rollout.engine import Engine
from specrl.rollout.refit.drafter_guard import DrafterGuard, guard_requests
from specrl.rollout.refit.policy_probe import RefitProbe, probe_sequences
from specrl.step_record import mean_of, read_steps, step_seconds_median, timing_share, total_stats
from specrl.tracking import Tracker, stage_run
from specrl.training.drafter.drafters import load_drafter, save_policy
from specrl.training.drafter.spot import SpotTraining
from specrl.training.megatron import checkpoint
from specrl.training.megatron.fp8 import LinearPrecision
from specrl.training.megatron.policy import Policy


def main(context: StageContext) -> None:
    started = time.monotonic()
    logs.set_up(context.config.cluster.log_level)
    ranks = join()
    with stage_run(context, ranks) as tracker, Progress(context.stage_dir, enabled=ranks.is_first) as progress:
        trainer = build(context, ranks, tracker)
        first_step = restore(trainer, context.input("pretrain", PretrainResult).rollouts_dir)
        run_loop(trainer, first_step, progress)
        finish(context, trainer, time.monotonic() - started)
        trainer.engine.shutdown()
    leave()


def build(context: StageContext, ranks: Ranks, tracker: Tracker) -> Trainer:
    """Policy, drafter and engine of this rank, with everything the loop needs."""
    config = context.config
    prepared = context.input("prepare", PrepareResult)
    pretrained = context.input("pretrain", PretrainResult)
    recipe = precision_recipe(context, prepared)
    check_precision(config, prepared.policy_dir)
    precision = training_precision(config, recipe)
    with logs.phase("loading of the policy"):
        policy = Policy(
            prepared.policy_dir,
            config.policy,
            dtype=config.model.dtype,
            ranks=ranks,
            num_updates=config.train.num_updates,
            seed=config.seed,
            fp8=precision,
            keep_reference=config.train.kl_coef > 0,
        )
    kv_observer = None
    if config.precision.kv_cache == "fp8":
        kv_observer = KvObserver(policy.model, policy.hf_config.num_hidden_layers, ranks.device)
        policy.kv_observer = kv_observer
    drafter = None
    if pretrained.drafter_dir is not None and config.speculation.draft_method.has_weights:
        drafter = load_drafter(config, pretrained.drafter_dir, prepared.policy_dir, ranks)
    with logs.phase("start of the engine"):
        engine = Engine(prepared.policy_dir, pretrained.drafter_dir, config=config, seed=config.seed, recipe=recipe)
    source, expected = PromptSource(config, load_tokenizer(prepared.policy_dir)), ResponseLengthEstimator()
    spot = SpotTraining(drafter) if drafter is not None and config.bubbles.trains_drafter else None
    return Trainer(
        config=config,
        ranks=ranks,
        policy=policy,
        precision=precision,
        kv_observer=kv_observer,
        layers_path=context.input("calibrate", CalibrateResult).layers_path,
        drafter=drafter,
        engine=engine,
        source=source,
        expected=expected,
        bubbles=Bubbles(config, ranks, engine, source, expected, spot),
        spot=spot,
        reward=make_reward(config.data),
        probe=RefitProbe(probe_sequences(pretrained.rollouts_dir), config),
        guard=DrafterGuard(engine, drafter, guard_requests(pretrained.rollouts_dir, config), ranks),
        tracker=tracker,
        rollouts_dir=context.run_dir / "rollouts",
        steps_dir=context.stage_dir / "steps",
        checkpoint_dir=context.run_dir / "checkpoints" / context.key,
    )


def precision_recipe(context: StageContext, prepared: PrepareResult) -> Recipe | None:
    """The calibrated FP8 recipe of this policy; none where nothing is in FP8."""
    if not context.config.precision.uses_fp8:
        return None
    return load_recipe(context.input("calibrate", CalibrateResult).scales_path, prepared.policy_dir)


def training_precision(config: Config, recipe: Recipe | None) -> LinearPrecision | None:
    if recipe is None or config.precision.training == "bf16":
        return None
    return LinearPrecision(recipe.bf16_layers, power_of_two=recipe.power_of_two)


def check_precision(config: Config, policy_dir: Path) -> None:
    """Refuse FP8 that this device or this layout does not have, before any weights are read.

    Raises:
        ValueError: one line that names the key.
    """
    precision, hf = config.precision, AutoConfig.from_pretrained(policy_dir)
    if precision.training == "fp8":
        native.check_training(hf, precision)
    if precision.generation == precision.training == "fp8":
        check_shards(hf, config.policy.tensor_parallel, config.engine.tensor_parallel)


def restore(trainer: Trainer, pretraining: Path) -> int:
    """Continue from the newest checkpoint, or from the start; drop what later, incomplete steps left behind.

    Args:
        pretraining: folder of the rollouts that the drafter was pretrained on.
    """
    found = checkpoint.latest(trainer.checkpoint_dir)
    first_step = 0
    if found:
        with logs.phase("loading of the checkpoint"):
            first_step = checkpoint.load(found, trainer.policy, trainer.drafter)
        trainer.engine.precision.restore(checkpoint.kv_scales(found))  # the loop's first refit ships them
    if trainer.ranks.is_first:
        for path in [*trainer.rollouts_dir.glob("step=*"), *trainer.steps_dir.glob("step=*")]:
            if int(path.stem.partition("=")[2]) >= first_step:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    trainer.ranks.barrier()
    expect_lengths(trainer, pretraining, first_step)
    return first_step


def expect_lengths(trainer: Trainer, pretraining: Path, first_step: int) -> None:
    """What an undisturbed run expects of response lengths before `first_step`: from its rollouts on disk."""
    config, source = trainer.config, trainer.source
    prompts, lengths = source.pretraining(config.drafter.num_prompts), stored_lengths(pretraining)
    trainer.expected.learn(prompts, lengths)
    for step in range(max(0, first_step - WINDOW), first_step):
        trainer.expected.learn(source.batch(step), stored_lengths(trainer.rollouts_dir / f"step={step:06d}"))


def finish(context: StageContext, trainer: Trainer, seconds: float) -> None:
    """Save policy and drafter where the next stages look for them; the result file last."""
    policy_dir, steps = context.stage_dir / "policy", trainer.config.train.num_steps
    with logs.phase("writing of policy and drafter"):
        drafter_dir = save_policy(trainer.policy, trainer.drafter, policy_dir, context.stage_dir / "drafter", steps)
    if not trainer.ranks.is_first:
        return
    recipe = trainer.engine.precision.recipe
    if recipe is not None:
        write_recipe(policy_dir / RECIPE_FILE, recipe, policy_dir)
    trainer.tracker.log_rollouts(trainer.rollouts_dir, "rollouts")
    records = read_steps(trainer.steps_dir)
    if trainer.engine.controller is not None:
        trainer.tracker.log_artifact(write_curve(context.stage_dir, context.config, trainer.engine.controller.curve()))
    stats = total_stats(records)
    result = TrainResult(
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
        refit_checks=len(records) + 1,  # one at the start, one after each step
        refit_failures=0,  # a failed check raises: a run that gets here had none
        drafter_events=[event for record in records for event in record.events],
        refit_max_abs_logprob_diff=max(record.metrics["refit/max_abs_logprob_diff"] for record in records),
        seconds=seconds,
    )
    trainer.tracker.log_params({f"precision_{name}": value for name, value in result.precision.model_dump().items()})
    write_result(context.stage_dir, result)


def precision_report(trainer: Trainer) -> PrecisionReport:
    """What each engine really did."""
    recipe = trainer.engine.precision.recipe
    config = trainer.config.precision
    return PrecisionReport(
        generation=config.generation,
        generation_mode=trainer.engine.mode,
        training=config.training,
        training_mode=trainer.precision.mode if trainer.precision is not None else "off",
        kv_cache=config.kv_cache,
        fp8_layers=len(recipe.fp8_layers) if recipe is not None else 0,
        bf16_layers=sorted(recipe.bf16_layers) if recipe is not None else [],
    )
