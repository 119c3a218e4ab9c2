"""The record of each RL step: its metrics, one small file per step, and their summary at the end of the stage."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev

from pydantic import TypeAdapter

from specrl.algorithms.advantages import zero_signal_fraction
from specrl.artifacts import write_json, write_text
from specrl.data.rewards.pool import describe
from specrl.distributed import Ranks
from specrl.events import drop_events, record_event
from specrl.metrics import OF_PARTS
from specrl.progress import Progress
from specrl.report.plots import gantt
from specrl.rollout.bubbles.generator import StepRollouts
from specrl.rollout.drafts.acceptance import DRAFTER, SpeculationStats
from specrl.schemas import MERGED, Rollout, merge_ranks, rollout_path, write_rollouts
from specrl.timeline import RankTimeline, Timer, bubble_metrics, rank_spans
from specrl.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

TIMED = ("generation", "policy_update", "drafter_update", "refit", "validation", "checkpoint")
"""The parts of a step's time, which is `step`; only some steps have a validation."""

LATE = ("timing/step_s", "timing/checkpoint_s")
"""The metrics of a step that are known only after its checkpoint has begun."""

OF_STEPS = frozenset({"drafter", "reward", "signal"})  # the kinds of events that a step records each time it is run

NOT_OF_THE_POLICY = frozenset({"num_tokens", "logprob_s", "sampled_fraction"})
"""Results of an update that are no metrics of the policy: the tokens trained on, seconds of log-prob passes, and the
share of the sequences that the drafter learns from."""


@dataclass(frozen=True)
class StepRecord:
    """The record of one step on disk, from which a restarted stage knows its past."""

    step: int
    metrics: dict[str, float]  # the metrics under their MLflow names, see `specrl/metrics.py`
    stats: SpeculationStats
    ranks: list[RankTimeline]  # the timeline of each rank, in the order of ranks
    events: list[str] = field(default_factory=list)
    """One line for each collapse or decline of the drafter, with the reaction."""

    @classmethod
    def of(
        cls, step: int, metrics: Mapping[str, float], generated: StepRollouts, events: list[str], timer: Timer
    ) -> StepRecord:
        """Assemble a step's record with the times so far.

        Until `StepRecorder.finish` gathers the timelines, this rank's work after generation stands for every rank's.
        """
        ranks = [RankTimeline(bubble, rank_spans(bubble, timer.spans)) for bubble in generated.bubbles]
        return cls(step, {**metrics, **timing_metrics(timer.seconds)}, generated.stats, ranks, events)


_RECORD = TypeAdapter(StepRecord)


class StepRecorder:
    """Writes a step's output: rollouts on every rank; record, picture and metrics on the first."""

    def __init__(self, ranks: Ranks, tracker: Tracker, rollouts_dir: Path, steps_dir: Path) -> None:
        self.rollouts_dir, self.steps_dir = rollouts_dir, steps_dir
        self._ranks, self._tracker = ranks, tracker
        self.metrics: dict[int, dict[str, float]] = {}
        """The metrics of this rank's steps and, on the first rank, of those with a record when the stage started."""
        self._background = ThreadPoolExecutor(1, "rollouts")
        self._merging: Future[None] | None = None

    def drop_from(self, first_step: int) -> None:
        """Remove the output of steps from `first_step` on; MLflow keeps their metrics (collective)."""
        if self._ranks.is_first:
            for path in [*self.rollouts_dir.glob("step=*"), *self.steps_dir.glob("step=*")]:
                if int(path.stem.partition("=")[2]) >= first_step:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            for path in self.rollouts_dir.glob(f"step=*/{MERGED}"):
                merge_ranks(path.parent)
            drop_events(self.steps_dir.parent, OF_STEPS, first_step)
            self.metrics = {record.step: record.metrics for record in read_steps(self.steps_dir)}
        self._ranks.barrier()

    def write_rollouts(self, step: int, rollouts: list[Rollout]) -> None:
        """Write the rollouts of a step that are this rank's to write as an Arrow file."""
        write_rollouts(rollout_path(self.rollouts_dir, step, self._ranks.rank), rollouts)

    def write(self, record: StepRecord) -> None:
        """Write the record and its picture on the first rank; a record of the same step is replaced."""
        self.metrics[record.step] = record.metrics
        if self._ranks.is_first:
            write_json(self.steps_dir / f"step={record.step:06d}.json", asdict(record))
            write_text(self._picture(record.step), gantt(record.ranks))

    def log_early(self, record: StepRecord) -> None:
        """Log the metrics of a step that are known before its end, so that a kill loses none of them."""
        early = {name: value for name, value in record.metrics.items() if name not in LATE}
        self._tracker.log_new_metrics(early, record.step)

    def report(self, record: StepRecord, generated: StepRollouts) -> None:
        """Record the problems of a step as events of the stage, on the first rank."""
        if not self._ranks.is_first:
            return
        for event in record.events:
            record_event(self.steps_dir.parent, "drafter", event, record.step)
        if generated.failures.count:
            text = describe(generated.failures, len(generated.rollouts))
            record_event(self.steps_dir.parent, "reward", text, record.step)

    def _merge(self, step: int, *, is_last: bool) -> None:
        """Merge the rollout files that all ranks have written in a step, in parallel with the next step."""
        self._end_merge()
        self._merging = self._background.submit(merge_ranks, rollout_path(self.rollouts_dir, step, 0).parent)
        if is_last:
            self._end_merge()

    def _end_merge(self) -> None:
        if self._merging is not None and (error := self._merging.exception()) is not None:
            logger.warning("the rollouts of a step stay in a file for each rank: %s", error)
        self._merging = None

    def finish(self, record: StepRecord, timer: Timer, num_steps: int, progress: Progress) -> None:
        """Complete the record with the times of the whole step on all ranks, write it and log it (collective)."""
        spans = self._ranks.gather(timer.spans)
        ranks = [
            RankTimeline(rank.bubble, rank_spans(rank.bubble, own))
            for rank, own in zip(record.ranks, spans, strict=True)
        ]
        record = replace(record, metrics=record.metrics | timing_metrics(timer.seconds), ranks=ranks)
        self._tracker.log_new_metrics(record.metrics, record.step)
        self.write(record)
        if self._ranks.is_first:
            self._tracker.log_artifact(self._picture(record.step), "gantt")
            self._merge(record.step, is_last=record.step + 1 == num_steps)
        text = "reward {reward/mean:.3f}, acceptance length {spec/acceptance_length:.2f}, {timing/step_s:.1f} s"
        message = "; ".join([text.format(**record.metrics), *record.events])
        progress.update(record.step + 1, num_steps, message=message, unit="step", phase="RL")

    def measured(self, metric: str | None) -> list[tuple[int, dict[str, float]]]:
        """The values of a metric in all records, each with the number of RL steps done then (collective)."""
        if metric is None:
            return []
        found = [(step + 1, {metric: values[metric]}) for step, values in self.metrics.items() if metric in values]
        return self._ranks.gather(found)[0]

    def recent_seconds(self, number: int) -> tuple[list[float], list[float]]:
        """The first rank's seconds of the last steps without their validations, and of validations (collective)."""
        metrics = [self.metrics[step] for step in sorted(self.metrics)[-number:]]
        validations = [values.get("timing/validation_s", 0.0) for values in metrics]
        steps = [values["timing/step_s"] - seconds for values, seconds in zip(metrics, validations, strict=True)]
        return self._ranks.gather((steps, [seconds for seconds in validations if seconds]))[0]

    def _picture(self, step: int) -> Path:
        return self.steps_dir / f"step={step:06d}.svg"


def step_metrics(
    generated: StepRollouts, policy: Mapping[str, float], drafter: Mapping[str, float], seconds: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of a step up to its refit, with this rank's wall times of each part so far.

    `policy` holds the metrics of the policy's update and the values in `NOT_OF_THE_POLICY`, `drafter` those of the
    drafter's update, if there was one.
    """
    rollouts = generated.rollouts
    rewards, groups = rollouts.rewards.tolist(), rollouts.prompt_ids.tolist()
    lengths = rollouts.response_lengths.tolist()
    return {
        **timing_metrics(seconds),
        "timing/logprob_s": policy["logprob_s"],
        "performance/generation_tokens_per_s": sum(lengths) / seconds["generation"],
        "performance/training_tokens_per_s": policy["num_tokens"] / seconds["policy_update"],
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        **{f"{OF_PARTS}{name}": fmean(column.tolist()) for name, column in rollouts.reward_parts.items()},
        "reward/zero_std_fraction": zero_signal_fraction(rewards, groups),
        **generated.metrics,
        "rollout/response_length_mean": fmean(lengths),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_fraction": fmean(rollouts.truncated.tolist()),
        **{f"policy/{name}": value for name, value in policy.items() if name not in NOT_OF_THE_POLICY},
        **{f"drafter/{name}": value for name, value in drafter.items()},
        **({"drafter/sampled_fraction": policy["sampled_fraction"]} if drafter else {}),
        **speculation_metrics(generated.stats),
        **bubble_metrics(generated.bubbles),
    }


def timing_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"timing/{part}_s": value for part, value in seconds.items()}


def speculation_metrics(stats: SpeculationStats) -> dict[str, float]:
    counters = {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_length": stats.acceptance_length,
        "decode_steps": stats.decode_steps,
    }
    for source, counts in stats.by_source.items():
        if source != DRAFTER:
            counters |= {f"{source}_draft_tokens": counts.num_draft_tokens}
            counters |= {f"{source}_accepted_tokens": counts.num_accepted_tokens}
    per_position = {f"acceptance_rate_pos_{i}": rate for i, rate in enumerate(stats.acceptance_rate_per_pos, start=1)}
    return {f"spec/{name}": float(value) for name, value in (counters | per_position).items()}


def read_steps(steps_dir: Path) -> list[StepRecord]:
    return [_RECORD.validate_json(path.read_bytes()) for path in sorted(steps_dir.glob("step=*.json"))]


def mean_of(records: list[StepRecord], prefix: str) -> dict[str, float]:
    """The mean of every metric below `prefix/` over the steps that have it, by its name without the prefix."""
    names = sorted({name for record in records for name in record.metrics if name.startswith(f"{prefix}/")})
    return {
        name.removeprefix(f"{prefix}/"): fmean(r.metrics[name] for r in records if name in r.metrics) for name in names
    }


def timing_share(records: list[StepRecord]) -> dict[str, float]:
    """The share of the steps' wall time that each part took; without the parts that no step had."""
    total = sum(record.metrics["timing/step_s"] for record in records)
    seconds = {part: sum(record.metrics.get(f"timing/{part}_s", 0.0) for record in records) for part in TIMED}
    return {part: value / total for part, value in seconds.items() if value}
