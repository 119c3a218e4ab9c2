"""The steps of a finished run: how much each had to do, and how many seconds its parts took."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from specrl.config import Config
from specrl.models.shapes import ModelShape
from specrl.projection.plan import rank_of
from specrl.projection.steps.arithmetic import BYTES, attention_flops, linear_weights, training_flops, update_bytes
from specrl.schemas import Rollout, read_rollouts

PARTS = ("generation", "policy_update", "drafter_update", "refit", "checkpoint")
"""The parts of a step that are simulated, under the names of their times; a validation is not."""


@dataclass(frozen=True)
class StepWork:
    """How much a step had to do. There is no time in it."""

    step: int
    update_flops: float
    """The operations of the policy update on one rank."""
    update_bytes: float
    """What the policy update reads and writes on one rank, in bytes."""
    trained_tokens: int
    """The tokens that the policy is trained on, with each prompt counted once for the responses to it."""
    drafter_flops: float
    """The operations of an update of the drafter on them on one rank."""
    merges: bool
    """Whether the drafters of ranks that trained while they waited are merged, instead of a training by all ranks."""
    probes: bool
    """Whether the refit generates the drafter's probe."""
    saves: bool
    """Whether the step copies its state for a checkpoint."""
    beside_checkpoint: bool
    """Whether it begins while the checkpoint of the step before is being written."""


@dataclass(frozen=True)
class EngineWork:
    """The decoding of one engine in one step."""

    iterations: int
    """The number of its iterations."""
    rows: int
    """The tokens that the policy computed in them: one for each request and iteration, and each drafted token."""
    seconds: float
    """The time that it took."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step's work beside its times."""

    work: StepWork
    engines: tuple[EngineWork, ...]
    seconds: Mapping[str, float]
    """The seconds of each of `PARTS`, and of the whole `step` without a validation."""


def read_steps(steps_dir: Path, rollouts_dir: Path, config: Config, shape: ModelShape) -> list[MeasuredStep]:
    """Read the steps of a run from its records and rollouts.

    Args:
        shape: That of the policy.

    Raises:
        ValueError: The rollouts of a step are gone.
    """
    records = [json.loads(path.read_text()) for path in sorted(steps_dir.glob("step=*.json"))]
    found = []
    for record in records:
        files = sorted((rollouts_dir / f"step={record['step']:06d}").glob("rank-*.arrow"))
        engines = [rows for path in files if (rows := read_rollouts(path))]
        if not engines:
            raise ValueError(f"no rollouts of step {record['step']} in {rollouts_dir}: steps are simulated from them")
        found.append(measured_step(record, engines, config, shape))
    return found


def measured_step(
    record: Mapping[str, Any], engines: Sequence[Sequence[Rollout]], config: Config, shape: ModelShape
) -> MeasuredStep:
    """Return a step from its record and the rollouts of each engine."""
    metrics = record["metrics"]
    seconds = {part: float(metrics.get(f"timing/{part}_s", 0.0)) for part in PARTS}
    seconds["step"] = metrics["timing/step_s"] - metrics.get("timing/validation_s", 0.0)
    bubbles = [rank["bubble"] for rank in record["ranks"]]
    decoding = tuple(_engine_work(rows, bubbles[rows[0].rank]) for rows in engines)
    return MeasuredStep(_step_work(record, [row for rows in engines for row in rows], config, shape), decoding, seconds)


def engine_bytes(config: Config, shape: ModelShape) -> float:
    """Return the bytes of the weights that each rank of an engine reads in an iteration."""
    return linear_weights(shape) * BYTES / config.engine.tensor_parallel


def _engine_work(rollouts: Sequence[Rollout], bubble: Mapping[str, Any]) -> EngineWork:
    iterations = sum(count for _, count, _ in bubble["pace"]) + 1  # the pace is without the last one
    tokens = sum(len(row.response_tokens) - row.num_accepted_tokens + row.num_draft_tokens for row in rollouts)
    return EngineWork(iterations, tokens, bubble["generated_at"] - bubble["started_at"])


def _step_work(record: Mapping[str, Any], rollouts: Sequence[Rollout], config: Config, shape: ModelShape) -> StepWork:
    train, policy = config.train, config.policy
    drops = train.drop_zero_signal_groups
    trained = [row for row in rollouts if row.advantage or not drops]
    prompts = {row.prompt_id: len(row.prompt_tokens) for row in trained}
    responses = sum(len(row.response_tokens) for row in trained)
    tokens = sum(prompts.values()) + responses
    lengths = [len(row.prompt_tokens) + len(row.response_tokens) for row in trained]
    flops = training_flops(shape, tokens, responses) + 3 * attention_flops(shape, lengths)
    passes = (train.updates_per_step > 1) + (train.kl_coef > 0)  # for log-probs: a forward pass, a third of the update
    sampled = record["metrics"].get("drafter/sampled_fraction", 1.0)  # the drafter may learn from a part of them
    step, ranks, updates = record["step"], len(record["ranks"]), train.updates_per_step
    sharded = policy.tensor_parallel * policy.pipeline_parallel
    own_tokens = tokens * sharded / ranks  # of a data-parallel rank; the ranks' shares are nearly equal
    batches = updates * max(1, ceil(own_tokens / updates / policy.tokens_per_micro_batch))
    return StepWork(
        step=step,
        update_flops=flops * (1 + passes / 3) / ranks,
        update_bytes=update_bytes(shape, updates, batches) / sharded,
        trained_tokens=tokens,
        drafter_flops=_drafter_flops(config, shape, tokens * sampled) / ranks,
        merges=any(rank["bubble"]["drafter_steps"] for rank in record["ranks"]),
        probes="refit/probe_acceptance_length" in record["metrics"],
        saves=_is_due(step + 1, config),
        beside_checkpoint=step > 0 and _is_due(step, config),
    )


def _drafter_flops(config: Config, shape: ModelShape, tokens: float) -> float:
    """Return the operations of an update of the drafter, whose training-time test computes each token several times."""
    if not config.speculation.draft_method.has_weights:
        return 0.0
    return 6 * rank_of(config, "train", shape).drafter_parameters * config.drafter.ttt_steps * tokens


def _is_due(version: int, config: Config) -> bool:
    """Return whether a checkpoint of this version of the policy is due, apart from one for being the best."""
    return version % config.train.checkpoint_every == 0 or version >= config.train.num_steps
