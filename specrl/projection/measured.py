"""A finished run as the tail simulator reads it: its response lengths and how fast its ranks decoded."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from specrl.projection.tail import DecodingSpeed, IterationCurve, SimulatedResponse
from specrl.schemas import Rollout, read_rollouts

ASSUMED_REPLAYED_TOKENS = 5.0
"""Tokens per iteration along stored text where a run has followed none: 0.2 decoding steps per token, same seeds."""

TELLING = 0.25
"""Share of a response beside stored text from which on its iterations tell of its own pace there."""


@dataclass(frozen=True)
class MeasuredRun:
    """What was measured of a run's generation."""

    steps: list[list[list[SimulatedResponse]]]
    """The responses of each rank by step, as they were dealt."""
    speed: DecodingSpeed
    has_replayed: bool
    """Whether `speed.replayed_tokens` is measured."""
    generation_s: list[float]
    """Seconds that the slowest rank took in each step."""
    iterations: list[float]
    """Decoding steps of the rank that needed most in each step."""
    idle_s: list[float]
    """Seconds that ranks waited in each step, summed over ranks."""


def read_run(steps_dir: Path, rollouts_dir: Path) -> MeasuredRun:
    """Read a run from the records of its steps and its rollouts.

    Raises:
        ValueError: the folder has no steps.
    """
    records = [json.loads(path.read_text()) for path in sorted(steps_dir.glob("step=*.json"))]
    if not records:
        raise ValueError(f"no RL steps in {steps_dir}: the run has not trained yet")
    speed, has_replayed = measured_speed(records)
    bubbles = [[rank["bubble"] for rank in record["ranks"]] for record in records]
    return MeasuredRun(
        steps=responses(rollouts_dir, records, speed.replayed_tokens),
        speed=speed,
        has_replayed=has_replayed,
        generation_s=[max(bubble["generated_at"] - bubble["started_at"] for bubble in step) for step in bubbles],
        iterations=[record["metrics"]["spec/decode_steps"] for record in records],
        idle_s=[record["metrics"]["bubble/idle_s"] for record in records],
    )


def measured_speed(records: Sequence[dict[str, Any]]) -> tuple[DecodingSpeed, bool]:
    """Return how fast the run decoded, and whether any stored text was followed, so that its speed is measured."""
    by_batch: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        for batch, iterations, seconds in (row for rank in record["ranks"] for row in rank["bubble"]["pace"]):
            by_batch[batch][0] += iterations
            by_batch[batch][1] += seconds
    curve = IterationCurve(tuple((batch, seconds / count) for batch, (count, seconds) in sorted(by_batch.items())))
    drafts, accepted = (sum(column) for column in zip(*map(replayed, records), strict=True))
    speed = DecodingSpeed(curve, 1 + accepted / drafts if drafts else ASSUMED_REPLAYED_TOKENS)
    shares = [record["metrics"].get("bubble/pregeneration_share") for record in records]
    known = [share for share in shares if share is not None]
    return replace(speed, pregeneration_share=fmean(known)) if known else speed, bool(drafts)


def responses(
    rollouts_dir: Path, records: Sequence[dict[str, Any]], replayed_tokens: float
) -> list[list[list[SimulatedResponse]]]:
    """Return the responses by step and rank; the expected length is the mean over prompts of as many tokens."""
    folders = [rollouts_dir / f"step={record['step']:06d}" for record in records]
    tables = [[list(read_rollouts(path)) for path in sorted(folder.glob("rank-*.arrow"))] for folder in folders]
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for row in (row for step in tables for rank in step for row in rank):
        sums[len(row.prompt_tokens)][0] += len(row.response_tokens)
        sums[len(row.prompt_tokens)][1] += 1
    means = {size: total / count for size, (total, count) in sums.items()}
    paces = {
        record["step"]: typical_pace([row for rank in step for row in rank], replayed(record))
        for record, step in zip(records, tables, strict=True)
    }
    rows = [row for step in tables for rank in step for row in rank]
    usual = usual_following(rows, replayed_tokens, paces)
    if usual is None:
        usual = other_following(records)

    def response(row: Rollout) -> SimulatedResponse:
        expected = means[len(row.prompt_tokens)]
        pace, follows = growth(row, replayed_tokens, paces[row.step])
        return SimulatedResponse(
            row.prompt_id, len(row.response_tokens), expected, pace, usual if follows is None else follows
        )

    return [[[response(row) for row in rank] for rank in step] for step in tables]


def replayed(record: dict[str, Any]) -> tuple[int, int]:
    """Return how many drafts of a step were text stored for the prompt, and how many of their tokens were accepted."""
    drafts, _, accepted = record["by_source"].get("replay", [0, 0, 0])
    return drafts, accepted


def typical_pace(rollouts: Sequence[Rollout], followed: tuple[int, int]) -> float:
    """Return the tokens per iteration of a step's responses where they follow no text stored for their prompt.

    Args:
        followed: the step's `replayed`; an iteration that verifies such a draft yields its accepted tokens and one.
    """
    drafts, accepted = followed
    tokens = sum(len(rollout.response_tokens) for rollout in rollouts)
    iterations = tokens - sum(rollout.num_accepted_tokens for rollout in rollouts) - drafts
    return max(1.0, (tokens - drafts - accepted) / iterations) if iterations > 0 else 1.0


def usual_following(rollouts: Sequence[Rollout], replayed_tokens: float, paces: Mapping[int, float]) -> float | None:
    """Return the share of stored text of their own seed that responses followed; None if none of them had any.

    Args:
        paces: `typical_pace` by step.
    """
    found = [(growth(row, replayed_tokens, paces[row.step])[1], row.own_stored_tokens) for row in rollouts]
    known = [(follows, tokens) for follows, tokens in found if follows is not None]
    total = sum(tokens for _, tokens in known)
    return sum(follows * tokens for follows, tokens in known) / total if total else None


def other_following(records: Sequence[dict[str, Any]]) -> float:
    """Return the share of pre-generated text that responses followed where all of it was of other seeds.

    It stands for the share of text of their own seed: the tokens that responses got along text stored for their prompt,
    of those that were pre-generated in the step before. It is 1 if none were.
    """
    stored = [sum(rank["bubble"]["pregenerated_tokens"] for rank in record["ranks"]) for record in records[:-1]]
    followed = [sum(replayed(record)) for record in records[1:]]
    return min(1.0, sum(followed) / sum(stored)) if sum(stored) else 1.0


def growth(rollout: Rollout, replayed_tokens: float, typical: float) -> tuple[float, float | None]:
    """Return a response's tokens per iteration where it followed no stored text, and the share that it followed.

    The share is that of the stored text of its own seed; it is None if there was none.

    What is known is how many iterations it took (its tokens less the accepted drafts). A response that needed more than
    its stored text and the typical pace explain has left that text; one that left it at once, or never, had a pace of
    its own.
    """
    length = len(rollout.response_tokens)
    iterations = max(1, length - rollout.num_accepted_tokens)
    own = min(rollout.own_stored_tokens, length)
    if not own:  # how far it followed texts of other seeds is not known
        return (typical if rollout.num_stored else length / iterations), None
    saved = 1 / typical - 1 / replayed_tokens  # iterations, by each token that is followed
    followed = (length / typical - iterations) / saved if saved > 0 else own
    followed = min(max(0.0, followed), own)
    if 0 < followed < own:
        return typical, followed / own
    beside = length - followed
    if beside < TELLING * length:
        return typical, followed / own
    left = iterations - followed / replayed_tokens
    return max(1.0, beside / max(1.0, left)), followed / own
