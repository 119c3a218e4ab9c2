"""The consecutive jobs of a stage; each job is a segment of its stage.

The first rank, whoever ends the job, and the flow append to `stages/KEY/segments.jsonl`, which is never rewritten,
since its writers may be killed at any time. A line holds a segment's number and new facts about it; the first value of
each fact stays.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from specrl.artifacts import append_line, digest, read_lines
from specrl.config import ClusterConfig

Reason = Literal[
    "finished",
    "walltime",
    "preempted",
    "requeued",
    "node lost",
    "hang",
    "killed",
    "stopped",
    "cancelled",
    "out of memory",
    "failed",
]
AGAIN: frozenset[Reason] = frozenset({"walltime", "preempted", "requeued", "node lost", "hang", "killed"})
"""The reasons after which the stage continues in another job."""
TAKEN_AWAY: frozenset[Reason] = frozenset({"preempted", "requeued", "node lost"})
"""The reasons caused by the cluster, not the stage."""
TAKEN_AWAY_FACTOR = 10  # factor on the allowed jobs without progress if the cluster took them away
SEGMENTS_FILE = "segments.jsonl"
TRAIN_PROGRESS = "checkpoints"  # marks the progress of training; all else is redone from there
NO_PROGRESS = frozenset(
    {SEGMENTS_FILE, "events.jsonl", "progress.json", "mlflow_run_id", "tracking", "load", "best.json"}
)
"""Files and folders that a stage writes without making progress."""


@dataclass(frozen=True)
class Segment:
    """One job of a stage. Times are Unix seconds; None is unknown."""

    number: int  # counted from 1
    job_id: str
    host: str  # the host of the first rank
    started: float
    mark: str  # a digest of the stage's progress when the job began
    attempt: int = 0  # how many times the scheduler had started this job id before
    ended: float | None = None
    reason: Reason | None = None  # why it ended; None while it runs or nobody has recorded it
    first_step: int | None = None  # of RL, or of the drafter's pretraining, counted in checkpoints
    last_step: int | None = None  # the last step that it completed
    failed_node: str | None = None  # the node of the hanging rank
    gave_up: str | None = None  # why the stage does not continue in another job although the reason allows it

    @property
    def has_failed(self) -> bool:
        return self.gave_up is not None or self.reason in ("failed", "out of memory")


_SEGMENT = TypeAdapter(Segment)


def read_segments(stage_dir: Path) -> list[Segment]:
    known: dict[int, dict[str, Any]] = {}
    for line in read_lines(stage_dir / SEGMENTS_FILE):
        if isinstance(line, dict) and isinstance(line.get("number"), int):
            known[line["number"]] = {**line, **known.get(line["number"], {})}
    segments = []
    for number in sorted(known):
        with contextlib.suppress(ValidationError):  # a segment that has not begun, or from another version of specrl
            segments.append(_SEGMENT.validate_python(known[number]))
    return segments


def begin_segment(stage_dir: Path, job_id: str, host: str, attempt: int = 0) -> Segment:
    """Append and return the segment of the job that begins now; `Segment` describes the arguments."""
    number = max((segment.number for segment in read_segments(stage_dir)), default=0) + 1
    segment = Segment(number, job_id, host, time.time(), progress_mark(stage_dir), attempt)
    append_line(stage_dir / SEGMENTS_FILE, json.dumps(_without_none(asdict(segment))))
    return segment


def add_to_segment(stage_dir: Path, number: int, **known: object) -> None:
    """Append new facts about a segment, by field name."""
    append_line(stage_dir / SEGMENTS_FILE, json.dumps({"number": number, **_without_none(known)}))


def end_segment(
    stage_dir: Path, number: int, reason: Reason, last_step: int | None, cluster: ClusterConfig, text: str = ""
) -> bool:
    """Record, unless known, that the latest segment has ended; return whether the stage should continue.

    `text` details the reason in a few words.
    """
    known = read_segments(stage_dir)[-1]
    if known.number != number:  # another job has taken over
        return False
    if known.reason is None:
        add_to_segment(stage_dir, number, ended=time.time(), reason=reason, last_step=last_step)
    segments = read_segments(stage_dir)
    if segments[-1].reason not in AGAIN or segments[-1].gave_up is not None:
        return False
    limit = reached_limit(segments, progress_mark(stage_dir), cluster)
    if limit is not None:
        add_to_segment(stage_dir, number, gave_up=f"{limit}; the last time: {text}" if text else limit)
    return limit is None


def progress_mark(stage_dir: Path) -> str:
    """A digest of the stage's progress: its files or, in the train stage, its checkpoints."""
    is_train = stage_dir.name.startswith("train-")
    root = stage_dir / TRAIN_PROGRESS if is_train else stage_dir
    found = []
    for path in root.rglob("*"):
        name = path.relative_to(root)
        if not any(part.startswith(".") or part in NO_PROGRESS for part in name.parts) and path.is_file():
            found.append((str(name), path.stat().st_size))
    return digest(sorted(found))


def last_recorded_step(stage_dir: Path) -> int | None:
    """The last RL step with a record in the stage's folder, or None."""
    return max((int(path.stem.partition("=")[2]) for path in stage_dir.glob("steps/step=*.json")), default=None)


def reached_limit(segments: Sequence[Segment], mark: str, cluster: ClusterConfig) -> str | None:
    """Why a stage with the progress `mark` must not continue in another job, in one line, or None.

    Only segments since the stage was last given up count, because `specrl resume` starts afresh.
    """
    series = list(takewhile(lambda segment: segment.gave_up is None and segment.reason in AGAIN, reversed(segments)))
    if cluster.max_segments is not None and len(series) >= cluster.max_segments:
        return f"not finished after {len(series)} jobs: cluster.max_segments = {cluster.max_segments}"
    stalled = list(takewhile(lambda segment: segment.mark == mark, series))
    own = sum(segment.reason not in TAKEN_AWAY for segment in stalled)
    if own < cluster.max_attempts and len(stalled) < TAKEN_AWAY_FACTOR * cluster.max_attempts:
        return None
    reasons = ", ".join(str(segment.reason) for segment in reversed(stalled))
    where = "" if stalled[0].first_step is None else f" at step {_next_step(stalled[0])}"
    advice = ", or one step takes longer than a job may" if stalled[0].reason == "walltime" else ""
    return (
        f"no progress in {len(stalled)} jobs in a row{where} ({reasons}): "
        f"cluster.max_attempts = {cluster.max_attempts} reached{advice}"
    )


def _next_step(segment: Segment) -> int:
    assert segment.first_step is not None
    return segment.first_step if segment.last_step is None else segment.last_step + 1


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
