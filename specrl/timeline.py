"""The timeline of each rank in a step: spans of time, from which bubbles are measured and drawn.

Times are Unix seconds. Those of several nodes agree as well as the nodes' clocks do: to milliseconds with NTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from specrl import logs

GENERATION, PREGENERATION, SPOT_TRAINING = "generation", "pregeneration", "drafter_training"


@dataclass(frozen=True)
class Span:
    """A piece of work from one time to another, in Unix seconds."""

    name: str
    started_at: float
    ended_at: float

    def within(self, start: float, end: float) -> float:
        """How many seconds of the span lie between two times."""
        return max(0.0, min(self.ended_at, end) - max(self.started_at, start))


@dataclass
class Timer:
    """Measures the wall time of the named parts of a step on this rank; each part is a phase in the rank's log."""

    spans: list[Span] = field(default_factory=list)
    running: dict[str, float] = field(default_factory=dict)
    """The start of each part in progress, by the monotonic clock."""

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Measure the block as the part of this name."""
        from torch.profiler import record_function  # imported here because reports read timelines without torch

        started, clock = time.time(), time.monotonic()
        self.running[part] = clock
        with logs.phase(part), record_function(part):
            yield
        del self.running[part]
        self.spans.append(Span(part, started, started + time.monotonic() - clock))

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each part, summed over its spans; a part in progress counts up to now."""
        now = time.monotonic()
        total = {part: now - clock for part, clock in self.running.items()}
        for span in self.spans:
            total[span.name] = total.get(span.name, 0.0) + span.ended_at - span.started_at
        return total


@dataclass(frozen=True)
class Bubble:
    """The generation of one rank in one step, and what the rank did until the slowest one was done."""

    rank: int
    started_at: float
    generated_at: float  # the time at which the rank had finished its own share
    spans: list[Span] = field(default_factory=list)  # its work after `generated_at`; it was idle otherwise
    pregenerated_tokens: int = 0  # the number of tokens of the next step that it generated in the bubble
    drafter_steps: int = 0  # the number of updates of the drafter that it made in the bubble
    refills: list[Span] = field(default_factory=list)
    """Its share of each refill of the step, after all ranks had resumed; it was idle in between."""


@dataclass(frozen=True)
class RankTimeline:
    """The whole step of one rank."""

    bubble: Bubble
    spans: list[Span]  # its generation, the use of its bubble, and later parts; it was idle in between


def bubble_metrics(bubbles: Sequence[Bubble]) -> dict[str, float]:
    """The totals of a step's bubbles over all ranks, under the names in MLflow."""
    last = max(bubble.generated_at for bubble in bubbles)
    overruns = [max(0.0, span.ended_at - last) for bubble in bubbles for span in bubble.spans]
    return {
        "bubble/idle_s": sum(last - bubble.generated_at for bubble in bubbles),
        "bubble/used_s": sum(span.within(bubble.generated_at, last) for bubble in bubbles for span in bubble.spans),
        "bubble/overrun_s": max(overruns, default=0.0),
        "bubble/pregenerated_tokens": float(sum(bubble.pregenerated_tokens for bubble in bubbles)),
        "bubble/drafter_steps": float(sum(bubble.drafter_steps for bubble in bubbles)),
    }


def joined(spans: Sequence[Span], gap: float = 0.005) -> list[Span]:
    """The spans, in which spans of one name that follow each other within `gap` seconds are merged."""
    result: list[Span] = []
    for span in spans:
        follows = bool(result) and result[-1].name == span.name and span.started_at - result[-1].ended_at < gap
        result.append(Span(span.name, result.pop().started_at, span.ended_at) if follows else span)
    return result


def rank_spans(bubble: Bubble, timer: Sequence[Span]) -> list[Span]:
    """The spans of one rank's step: generation and bubble, then the parts after them as timed."""
    own = Span(GENERATION, bubble.started_at, bubble.generated_at)
    return [own, *bubble.spans, *bubble.refills, *(span for span in timer if span.name not in (GENERATION, "step"))]


timeline_from = TypeAdapter(RankTimeline).validate_python
"""Builds a timeline from the JSON of its `asdict` form."""
