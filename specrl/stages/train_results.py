"""The results of stage `train`: the last and the best policy, each with its drafter, and the sums over all steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

from specrl import logs
from specrl.artifacts import BestPolicy, PrecisionReport, TrainResult, write_result, write_text
from specrl.context import StageContext
from specrl.events import read_events, record_event
from specrl.lineage.history import kept_checkpoints
from specrl.loop import Trainer
from specrl.precision.recipe import RECIPE_FILE, write_recipe
from specrl.report.curve import curve_chart
from specrl.step_record import (
    StepRecord,
    mean_of,
    read_steps,
    speedup_estimate,
    step_seconds_median,
    timing_share,
    total_stats,
)
from specrl.tracking import Tracker
from specrl.training.checkpoint.load import load
from specrl.training.checkpoint.manifest import CheckpointError
from specrl.training.drafter.drafters import save_policy
from specrl.validation.next_step import write_next_step

BEST_FOLDER, CURVE_PICTURE = "best", "validation.svg"
"""The best policy with its drafter, and the picture of the curve of validation, in the stage's folder."""


def finish(context: StageContext, trainer: Trainer, last: int, tracker: Tracker, seconds: float) -> None:
    """Save the policy after `last` steps and the best one, with their drafters; the result comes last (collective)."""
    folder, records = context.stage_dir, read_steps(trainer.recorder.steps_dir)
    write_next_step(folder, last, trainer.ranks, trainer.generator, trainer.engine)
    with logs.phase("writing of policy and drafter"):
        policy_dir, drafter_dir = write_policy(trainer, folder, last)
        best = write_best(context, trainer, last)
    if not trainer.ranks.is_first:
        return
    log_results(context, trainer, last, tracker)
    taken = best if best is not None and context.config.train.final == "best" else None
    result = TrainResult(
        policy_dir=taken.policy_dir if taken else policy_dir,
        drafter_dir=taken.drafter_dir if taken else drafter_dir,
        policy_step=taken.step if taken else last,
        steps=len(records),
        stopped_early=trainer.early_stop.reason,
        best=best,
        **sum_up(records),
        precision=precision_report(trainer),
        refit_checks=trainer.refit.counts.checks,
        refit_failures=trainer.refit.counts.failures,
        seconds=seconds,
    )
    tracker.log_params({f"precision_{name}": value for name, value in result.precision.model_dump().items()})
    write_result(folder, result)


def write_policy(trainer: Trainer, folder: Path, version: int) -> tuple[Path, Path | None]:
    policy_dir = folder / "policy"
    drafter_dir = save_policy(trainer.policy, trainer.drafter, policy_dir, folder / "drafter", version)
    recipe = trainer.engine.precision.recipe
    if trainer.ranks.is_first and recipe is not None:
        write_recipe(policy_dir / RECIPE_FILE, recipe, policy_dir)
    return policy_dir, drafter_dir


def write_best(context: StageContext, trainer: Trainer, last: int) -> BestPolicy | None:
    """Write the best policy of those whose checkpoints there are; None where nothing was validated (collective).

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
    """Load the best policy that the trainer holds or a whole checkpoint has; return its step and value (collective).

    A damaged checkpoint is left out, and an event tells of it.
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


def log_results(context: StageContext, trainer: Trainer, last: int, tracker: Tracker) -> None:
    folder, reason = context.stage_dir, trainer.early_stop.reason
    if reason is not None and all(event.text != reason for event in read_events(folder)):
        record_event(folder, "early stop", reason, step=last)
    if trainer.validation.curve:
        write_text(folder / CURVE_PICTURE, curve_chart(trainer.validation.curve))
        tracker.log_artifact(folder / CURVE_PICTURE)
    tracker.log_rollouts(trainer.recorder.rollouts_dir, "rollouts")


def sum_up(records: list[StepRecord]) -> dict[str, Any]:
    stats = total_stats(records)
    return {
        "step_seconds_median": step_seconds_median(records),
        "timing_share": timing_share(records),
        "reward_first": records[0].metrics["reward/mean"],
        "reward_last": records[-1].metrics["reward/mean"],
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate_per_pos": list(stats.acceptance_rate_per_pos),
        "speedup_estimate": speedup_estimate(records),
        "mismatch": mean_of(records, "mismatch"),
        "drafter_events": [event for record in records for event in record.events],
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
