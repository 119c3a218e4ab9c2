"""The record of each RL step: its metrics, one small file per step, and their summary at the end of the stage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import torch

from specrl.algorithms.advantages import zero_signal_fraction
from specrl.artifacts import write_json
from specrl.precision.mismatch import mismatch_metrics
from specrl.rollout.drafts.acceptance import RECENT, REPLAY, SourceCounts, SpeculationStats
from specrl.rollout.drafts.controller import Controller
from specrl.rollout.refit.drafter_guard import GuardReport
from specrl.rollout.refit.parity import ParityReport
from specrl.schemas import Rollout
from specrl.timeline import RankTimeline, timeline_from

TIMED = ("generation", "policy_update", "drafter_update", "refit", "checkpoint")
"""Parts of a step that its time is divided into; `step` is the whole."""


@dataclass(frozen=True)
class StepRecord:
    step: int
    metrics: dict[str, float]
    """MLflow names, see `specrl/metrics.py`."""
    num_drafts: int
    accepted_per_pos: list[int]
    drafted_per_pos: list[int]
    by_source: dict[str, SourceCounts]
    ranks: list[RankTimeline]
    """What each rank did when."""
    events: list[str] = field(default_factory=list)
    """Drafters that collapsed, and what was done."""

    @classmethod
    def of(
        cls,
        step: int,
        metrics: dict[str, float],
        stats: SpeculationStats,
        ranks: list[RankTimeline],
        events: list[str],
    ) -> StepRecord:
        return cls(
            step,
            metrics,
            stats.num_drafts,
            list(stats.accepted_per_pos),
            list(stats.drafted_per_pos),
            dict(stats.by_source),
            ranks,
            events,
        )


def step_metrics(
    rollouts: list[Rollout],
    stats: SpeculationStats,
    policy: Mapping[str, float],
    drafter: Mapping[str, float],
    mismatch: Mapping[str, float],
    bubbles: Mapping[str, float],
    parity: ParityReport,
    guard: GuardReport,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Everything a step is judged by, under the names of the design.

    Args:
        stats: summed over the engines; `decode_steps` is the slowest engine's.
        seconds: this rank's wall times.
    """
    rewards = [rollout.reward for rollout in rollouts]
    groups = [rollout.prompt_id for rollout in rollouts]
    lengths = [len(rollout.response_tokens) for rollout in rollouts]
    metrics = part_metrics(seconds)
    metrics |= {
        "performance/generation_tokens_per_s": sum(lengths) / seconds["generation"],
        "performance/training_tokens_per_s": policy["num_tokens"] / seconds["policy_update"],
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/zero_std_fraction": zero_signal_fraction(rewards, groups),
        "rollout/response_length_mean": fmean(lengths),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_fraction": fmean(rollout.finish_reason == "length" for rollout in rollouts),
        "refit/max_abs_logprob_diff": parity.maximum,
        "refit/mean_abs_logprob_diff": parity.mean,
    }
    metrics |= {f"policy/{name}": value for name, value in policy.items() if name != "num_tokens"}
    metrics |= {f"drafter/{name}": value for name, value in drafter.items()}
    return {**metrics, **speculation_metrics(stats), **guard.metrics(), **mismatch, **bubbles}


def speculation_metrics(stats: SpeculationStats) -> dict[str, float]:
    counters = {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_length": stats.acceptance_length,
        "decode_steps": stats.decode_steps,
    }
    for source in (REPLAY, RECENT):
        if counts := stats.by_source.get(source):
            counters |= {f"{source}_draft_tokens": counts.num_draft_tokens}
            counters |= {f"{source}_accepted_tokens": counts.num_accepted_tokens}
    per_position = {f"acceptance_rate_pos_{i}": rate for i, rate in enumerate(stats.acceptance_rate_per_pos, start=1)}
    return {f"spec/{name}": float(value) for name, value in (counters | per_position).items()}


def part_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """Wall times of a step's parts."""
    return {f"timing/{part}_s": value for part, value in seconds.items()}


def controller_metrics(controller: Controller | None) -> dict[str, float]:
    """What this rank's controller did in the step, and what it has settled on by running batch size."""
    if controller is None:
        return {}
    mean = controller.take_mean_length()
    metrics = {"spec/k": mean} if mean is not None else {}
    for point in controller.curve():
        if point.chosen:
            chosen = {"k": float(point.k), "replay_k": float(point.replay_k), "tokens_per_s": point.tokens_per_s}
            metrics |= {f"spec/chosen_{name}_batch_{point.batch}": value for name, value in chosen.items()}
    return metrics


def mismatch_of(rollouts: list[Rollout]) -> dict[str, float]:
    """Disagreement between the engine that sampled and the trainer, over the rollouts trained on; empty without any."""
    pairs = [(r.policy_logprobs, r.generation_logprobs) for r in rollouts if r.policy_logprobs is not None]
    if not pairs:
        return {}
    trained = torch.tensor([value for row, _ in pairs for value in row])
    generated = torch.tensor([value for _, row in pairs for value in row])
    return mismatch_metrics(trained, generated)


def write_step(steps_dir: Path, record: StepRecord) -> None:
    write_json(steps_dir / f"step={record.step:06d}.json", asdict(record))


def read_steps(steps_dir: Path) -> list[StepRecord]:
    return [_record(json.loads(path.read_text())) for path in sorted(steps_dir.glob("step=*.json"))]


def _record(data: dict[str, Any]) -> StepRecord:
    return StepRecord(**{**data, "ranks": [timeline_from(rank) for rank in data["ranks"]]})


def mean_of(records: list[StepRecord], prefix: str) -> dict[str, float]:
    """Mean over the steps of every metric below `prefix/`, by its name without the prefix."""
    names = sorted({name for record in records for name in record.metrics if name.startswith(f"{prefix}/")})
    return {
        name.removeprefix(f"{prefix}/"): fmean(r.metrics[name] for r in records if name in r.metrics) for name in names
    }


def timing_share(records: list[StepRecord]) -> dict[str, float]:
    """Share of the steps' wall time that each part took."""
    total = sum(record.metrics["timing/step_s"] for record in records)
    return {part: sum(record.metrics[f"timing/{part}_s"] for record in records) / total for part in TIMED}


def step_seconds_median(records: list[StepRecord]) -> float:
    return median(record.metrics["timing/step_s"] for record in records)


def total_stats(records: list[StepRecord]) -> SpeculationStats:
    """Speculation counters of all steps together."""
    return SpeculationStats.merge(
        SpeculationStats(
            num_drafts=record.num_drafts,
            num_draft_tokens=int(record.metrics["spec/num_draft_tokens"]),
            num_accepted_tokens=int(record.metrics["spec/num_accepted_tokens"]),
            accepted_per_pos=tuple(record.accepted_per_pos),
            decode_steps=int(record.metrics["spec/decode_steps"]),
            drafted_per_pos=tuple(record.drafted_per_pos),
            by_source={source: SourceCounts(*counts) for source, counts in record.by_source.items()},
        )
        for record in records
    )
