"""The measurements of a run that the tail simulator needs: its response lengths and how fast its ranks decoded."""

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
"""Tokens per iteration along stored text for runs that have followed none: 0.2 decoding steps per token, same seeds."""

MIN_OWN_SHARE = 0.25
"""The smallest share of a response outside stored text from which its own pace there is measured."""


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements of a run's generation, step by step."""

    steps: list[list[list[SimulatedResponse]]]
    """The responses of each step and rank, as they were dealt."""
    speed: DecodingSpeed
    """How fast responses were decoded."""
    has_replayed: bool
    """Whether `speed.replayed_tokens` was measured; if not, it is assumed."""
    generation_s: list[float]
    """The seconds that the slowest rank took in each step."""
    iterations: list[float]
    """The decoding steps of the rank that needed most in each step."""
    idle_s: list[float]
    """The seconds that ranks waited in each step, summed over ranks."""


def read_run(steps_dir: Path, rollouts_dir: Path) -> MeasuredRun:
    """Read a run from the records of its steps and its rollouts.

    Raises:
        ValueError: The folder has no steps.
    """
    records = [json.loads(path.read_text()) for path in sorted(steps_dir.glob("step=*.json"))]
    if not records:
        raise ValueError(f"no RL steps in {steps_dir}: the run has not trained yet")
    speed, has_replayed = measured_speed(records)
    bubbles = [[rank["bubble"] for rank in record["ranks"]] for record in records]
    return MeasuredRun(
        steps=responses(rollouts_dir, records, speed),
        speed=speed,
        has_replayed=has_replayed,
        generation_s=[max(bubble["generated_at"] - bubble["started_at"] for bubble in step) for step in bubbles],
        iterations=[record["metrics"]["spec/decode_steps"] for record in records],
        idle_s=[record["metrics"]["bubble/idle_s"] for record in records],
    )


def measured_speed(records: Sequence[dict[str, Any]]) -> tuple[DecodingSpeed, bool]:
    """Return how fast a run decoded, and whether it followed any stored text, so that its speed there was measured."""
    by_batch: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        for batch, iterations, seconds in (row for rank in record["ranks"] for row in rank["bubble"]["pace"]):
            by_batch[batch][0] += iterations
            by_batch[batch][1] += seconds
    curve = IterationCurve(tuple((batch, seconds / count) for batch, (count, seconds) in sorted(by_batch.items())))
    drafts, drafted, accepted = (sum(column) for column in zip(*map(replay_counts, records), strict=True))
    tokens = 1 + accepted / drafts if drafts else ASSUMED_REPLAYED_TOKENS
    speed = DecodingSpeed(curve, tokens, drafted / drafts if drafts else ASSUMED_REPLAYED_TOKENS)
    shares = [record["metrics"].get("bubble/pregeneration_share") for record in records]
    known = [share for share in shares if share is not None]
    return replace(speed, pregeneration_share=fmean(known)) if known else speed, bool(drafts)


def responses(
    rollouts_dir: Path, records: Sequence[dict[str, Any]], speed: DecodingSpeed
) -> list[list[list[SimulatedResponse]]]:
    """Return the responses by step and engine, of which the first rank has written them.

    The expected length of a response is the mean over all responses to prompts of the same number of tokens.
    """
    folders = [rollouts_dir / f"step={record['step']:06d}" for record in records]
    files = [sorted(folder.glob("rank-*.arrow")) for folder in folders]
    tables = [[rows for path in paths if (rows := read_rollouts(path))] for paths in files]
    rows = [row for step in tables for rank in step for row in rank]
    lengths: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        lengths[len(row.prompt_tokens)].append(len(row.response_tokens))
    means = {size: fmean(found) for size, found in lengths.items()}
    by_step = {
        record["step"]: [row for rank in step for row in rank] for record, step in zip(records, tables, strict=True)
    }
    paces = {record["step"]: typical_pace(by_step[record["step"]], replayed(record)) for record in records}
    drafts = {record["step"]: typical_drafts(by_step[record["step"]], record) for record in records}
    usual = usual_following(rows, speed.replayed_tokens, paces)
    if usual is None:
        usual = other_following(records)

    def response(row: Rollout) -> SimulatedResponse:
        expected = means[len(row.prompt_tokens)]
        pace, found = growth(row, speed.replayed_tokens, paces[row.step])
        follows = usual if found is None else found
        iterations = max(1, len(row.response_tokens) - row.num_accepted_tokens)
        own = drafts[row.step] if row.num_stored else row.num_draft_tokens / iterations
        return SimulatedResponse(row.prompt_id, len(row.response_tokens), expected, pace, follows, own)

    return [[[response(row) for row in rank] for rank in step] for step in tables]


def replay_counts(record: dict[str, Any]) -> tuple[int, int, int]:
    """Return how many of a step's drafts came from text stored for the prompt, their tokens, and the accepted ones.

    Args:
        record: The step's record.
    """
    drafts, drafted, accepted = record["by_source"].get("replay", [0, 0, 0])
    return drafts, drafted, accepted


def replayed(record: dict[str, Any]) -> tuple[int, int]:
    """Return the drafts of `replay_counts` and their accepted tokens."""
    drafts, _, accepted = replay_counts(record)
    return drafts, accepted


def typical_drafts(rollouts: Sequence[Rollout], record: dict[str, Any]) -> float:
    """Return the tokens drafted for a response in an iteration where it does not follow text stored for its prompt.

    Args:
        record: The step's record.
    """
    drafts, drafted, _ = replay_counts(record)
    iterations = sum(len(rollout.response_tokens) - rollout.num_accepted_tokens for rollout in rollouts) - drafts
    others = sum(rollout.num_draft_tokens for rollout in rollouts) - drafted
    return max(0.0, others / iterations) if iterations > 0 else 0.0


def typical_pace(rollouts: Sequence[Rollout], followed: tuple[int, int]) -> float:
    """Return the tokens per iteration of a step's responses where they do not follow text stored for their prompt.

    Args:
        followed: The step's `replayed`. An iteration that verifies such a draft gives its accepted tokens and one more.
    """
    drafts, accepted = followed
    tokens = sum(len(rollout.response_tokens) for rollout in rollouts)
    iterations = tokens - sum(rollout.num_accepted_tokens for rollout in rollouts) - drafts
    return max(1.0, (tokens - drafts - accepted) / iterations) if iterations > 0 else 1.0


def usual_following(rollouts: Sequence[Rollout], replayed_tokens: float, paces: Mapping[int, float]) -> float | None:
    """Return the share of the stored text of their own seeds that responses followed; None if there was no such text.

    Args:
        paces: The `typical_pace` of each step.
    """
    found = [(growth(row, replayed_tokens, paces[row.step])[1], row.own_stored_tokens) for row in rollouts]
    known = [(follows, tokens) for follows, tokens in found if follows is not None]
    total = sum(tokens for _, tokens in known)
    return sum(follows * tokens for follows, tokens in known) / total if total else None


def other_following(records: Sequence[dict[str, Any]]) -> float:
    """Return the share of pre-generated text that responses followed, for a run whose text was all of other seeds.

    It stands in for the share of text of their own seeds. It is the number of tokens that responses got along text
    stored for their prompt, divided by the number that was pre-generated in the steps before; 1 if there were none.
    """
    stored = [sum(rank["bubble"]["pregenerated_tokens"] for rank in record["ranks"]) for record in records[:-1]]
    followed = [sum(replayed(record)) for record in records[1:]]
    return min(1.0, sum(followed) / sum(stored)) if sum(stored) else 1.0


def growth(rollout: Rollout, replayed_tokens: float, typical: float) -> tuple[float, float | None]:
    """Return a response's tokens per iteration outside stored text, and the share of stored text that it followed.

    The share is that of the stored text of the response's own seed, and None if there was none. Only the number of
    iterations is known, which is that of the tokens less the accepted ones. It is explained by how far the response
    followed its stored text at `replayed_tokens` per iteration, going on at the typical pace. Where the response would
    have to follow none or all of the text, the pace explains the rest, unless too little lies outside the text.

    Args:
        replayed_tokens: The tokens per iteration along stored text.
        typical: The `typical_pace` of the step.
    """
    length = len(rollout.response_tokens)
    iterations = max(1, length - rollout.num_accepted_tokens)
    own = min(rollout.own_stored_tokens, length)
    if not own:  # it is not known how far it followed texts of other seeds
        return (typical if rollout.num_stored else length / iterations), None
    saved = 1 / typical - 1 / replayed_tokens  # the iterations that each followed token saves
    followed = (length / typical - iterations) / saved if saved > 0 else own
    followed = min(max(0.0, followed), own)
    if 0 < followed < own:
        return typical, followed / own
    outside = length - followed
    if outside < MIN_OWN_SHARE * length:
        return typical, followed / own
    left = iterations - followed / replayed_tokens
    return max(1.0, outside / max(1.0, left)), followed / own
