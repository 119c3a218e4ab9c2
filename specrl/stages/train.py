"""Stage `train`: the RL loop on all ranks, from the last complete step on."""

from __future__ import annotations

import shutil
import time

from specrl.artifacts import CalibrateResult, PrepareResult, PretrainResult, TrainResult, write_result
from specrl.data.models import load_tokenizer
from specrl.data.prompts import PromptSource
from specrl.data.rewards import make_reward
from specrl.distributed import Ranks, join, leave
from specrl.loop import Trainer, run_loop
from specrl.precision.calibration import load_precision
from specrl.precision.fp8 import LinearPrecision
from specrl.progress import Progress
from specrl.rollout.engine import Engine
from specrl.rollout.probe import RefitProbe, probe_sequences
from specrl.stages.context import StageContext
from specrl.steps import mean_of, read_steps, step_seconds_median, timing_share, total_stats
from specrl.tracking import Tracker, stage_run
from specrl.training import checkpoint
from specrl.training.drafter import Drafter
from specrl.training.policy import Policy


def main(context: StageContext) -> None:
    started = time.monotonic()
    ranks = join()
    with stage_run(context, ranks) as tracker, Progress(context.stage_dir, enabled=ranks.is_first) as progress:
        trainer = build(context, ranks, tracker)
        first_step = restore(trainer)
        run_loop(trainer, first_step, progress)
        finish(context, trainer, time.monotonic() - started)
        trainer.engine.shutdown()
    leave()


def build(context: StageContext, ranks: Ranks, tracker: Tracker) -> Trainer:
    """Policy, drafter and engine of this rank, with everything the loop needs."""
    config = context.config
    prepared = context.input("prepare", PrepareResult)
    pretrained = context.input("pretrain", PretrainResult)
    precision = training_precision(context, prepared)
    policy = Policy(
        prepared.policy_dir,
        config.policy,
        dtype=config.model.dtype,
        ranks=ranks,
        seed=config.seed,
        fp8=precision,
        keep_reference=config.train.kl_coef > 0,
    )
    drafter = None
    if pretrained.drafter_dir is not None:
        drafter = Drafter.load(pretrained.drafter_dir, prepared.policy_dir, config.drafter, ranks, seed=config.seed)
    return Trainer(
        config=config,
        ranks=ranks,
        policy=policy,
        precision=precision,
        drafter=drafter,
        engine=Engine(prepared.policy_dir, pretrained.drafter_dir, config=config, seed=config.seed),
        source=PromptSource(config, load_tokenizer(prepared.policy_dir)),
        reward=make_reward(config.data),
        probe=RefitProbe(probe_sequences(pretrained.rollouts_dir), config),
        tracker=tracker,
        rollouts_dir=context.run_dir / "rollouts",
        steps_dir=context.stage_dir / "steps",
        checkpoint_dir=context.run_dir / "checkpoints" / context.key,
    )


def training_precision(context: StageContext, prepared: PrepareResult) -> LinearPrecision | None:
    """The calibrated FP8 recipe of this policy; none in BF16."""
    if context.config.precision.training == "bf16":
        return None
    return load_precision(context.input("calibrate", CalibrateResult).scales_path, prepared.policy_dir)


def restore(trainer: Trainer) -> int:
    """Continue from the newest checkpoint, or from the start; drop what later, incomplete steps left behind."""
    found = checkpoint.latest(trainer.checkpoint_dir)
    first_step = checkpoint.load(found, trainer.policy, trainer.drafter) if found else 0
    if trainer.ranks.is_first:
        for path in [*trainer.rollouts_dir.glob("step=*"), *trainer.steps_dir.glob("step=*")]:
            if int(path.stem.partition("=")[2]) >= first_step:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    trainer.ranks.barrier()
    return first_step


def finish(context: StageContext, trainer: Trainer, seconds: float) -> None:
    """Save policy and drafter where the next stages look for them; the result file last."""
    policy_dir = context.stage_dir / "policy"
    drafter_dir = context.stage_dir / "drafter" if trainer.drafter is not None else None
    trainer.policy.save_pretrained(policy_dir)
    if not trainer.ranks.is_first:
        return
    if trainer.drafter is not None and drafter_dir is not None:
        trainer.drafter.save(drafter_dir, policy_version=trainer.config.train.num_steps)
    trainer.tracker.log_rollouts(trainer.rollouts_dir, "rollouts")
    records = read_steps(trainer.steps_dir)
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
        refit_checks=len(records) + 1,  # one at the start, one after each step
        refit_failures=0,  # a failed check raises: a run that gets here had none
        refit_max_abs_logprob_diff=max(record.metrics["refit/max_abs_logprob_diff"] for record in records),
        seconds=seconds,
    )
    write_result(context.stage_dir, result)
