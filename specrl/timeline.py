"""The timeline of each rank in a step: spans of time, from which bubbles are measured and drawn.

Times are Unix seconds. Those of several nodes agree as well as the nodes' clocks do: to milliseconds with NTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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
    """The beginning of each part that is under way, by the monotonic clock."""

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Measure the block as the part of this name."""
        from torch.profiler import record_function  # here, as reports read timelines without torch

        started, clock = time.time(), time.monotonic()
        self.running[part] = clock
        with logs.phase(part), record_function(part):
            yield
        del self.running[part]
        self.spans.append(Span(part, started, started + time.monotonic() - clock))

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each part, summed over its spans; for a part that is under way, those so far."""
        now = time.monotonic()
        total = {part: now - clock for part, clock in self.running.items()}
        for span in self.spans:
            total[span.name] = total.get(span.name, 0.0) + span.ended_at - span.started_at
        return total


class Pace:
    """Measures the seconds of engine iterations by the number of running requests, down to the last request."""

    def __init__(self, num_requests: int, most_running: int) -> None:
        self._most_running = most_running
        self._found: dict[int, list[float]] = {}
        self.begin(num_requests)

    def begin(self, num_requests: int) -> None:
        """Begin a generation of so many requests, after the time until then, which is nobody's pace."""
        self._left, self._batch = num_requests, min(num_requests, self._most_running)
        self._since = time.perf_counter()

    def on_progress(self, finished: int, total: int) -> None:
        """Note how many requests are finished; a hook for `Engine.generate`."""
        self._left = total - finished

    def on_iteration(self) -> None:
        """Note that an iteration has ended; a hook for `Engine.generate`."""
        now = time.perf_counter()
        count_seconds = self._found.setdefault(self._batch, [0, 0.0])
        count_seconds[0] += 1
        count_seconds[1] += now - self._since
        self._since, self._batch = now, min(self._left, self._most_running)

    def rows(self) -> list[tuple[int, int, float]]:
        """(running requests, iterations, seconds), without the iteration that finished the last request."""
        return [(batch, int(count), seconds) for batch, (count, seconds) in sorted(self._found.items())]


@dataclass(frozen=True)
class Bubble:
    """The generation of one rank in one step, and what the rank did until the slowest one was done."""

    rank: int
    started_at: float
    generated_at: float
    """The time at which the rank had finished its own share."""
    resumed_at: float
    """The time at which it was done with other work and waited for the others."""
    num_tokens: int
    """The number of response tokens of its own share, and of refills."""
    tail_s: float
    """The seconds from when nine tenths of its responses were finished until the last one was."""
    spans: list[Span] = field(default_factory=list)
    """Its work between `generated_at` and `resumed_at`; the rest of the time it waited."""
    pregenerated_tokens: int = 0
    """The number of tokens of the next step that it generated in the bubble."""
    drafter_steps: int = 0
    """The number of updates of the drafter that it made in the bubble."""
    pace: list[tuple[int, int, float]] = field(default_factory=list)
    """The pace of its own share, `Pace.rows`."""
    saved_s: float | None = None
    """An estimate of the seconds that drafts saved in its own share, and in refills, by the cost model's plain
    iterations; None where there is none."""
    refills: list[Span] = field(default_factory=list)
    """Its share of each refill of the step, after all ranks had resumed; in between it waited."""

    @property
    def own_s(self) -> float:
        """The seconds of its own share, of refills too."""
        refills = sum(span.ended_at - span.started_at for span in self.refills)
        return self.generated_at - self.started_at + refills


@dataclass(frozen=True)
class RankTimeline:
    """The whole step of one rank."""

    bubble: Bubble
    spans: list[Span]
    """Its generation, the use of its bubble, and the parts after that; in between it waited."""


@dataclass(frozen=True)
class BubbleTotals:
    """The bubbles of all ranks in one step, in seconds."""

    idle_s: float
    """Time from the end of each rank's own share to the end of the last one's, summed over ranks, used or not."""
    used_s: float
    """The part of `idle_s` in which something was done."""
    overrun_s: float
    """Time by which the use of a bubble outlasted the slowest generation, on the rank where it was longest."""
    generation_s: float
    """Time from the first rank's start to the last share's end, times the number of ranks: `idle_s` is a part of it."""


def totals(bubbles: Sequence[Bubble]) -> BubbleTotals:
    """The totals of one step.

    Args:
        bubbles: The bubbles of all ranks.
    """
    last = max(bubble.generated_at for bubble in bubbles)
    first = min(bubble.started_at for bubble in bubbles)
    used = sum(span.within(bubble.generated_at, last) for bubble in bubbles for span in bubble.spans)
    overruns = [max(0.0, span.ended_at - last) for bubble in bubbles for span in bubble.spans]
    return BubbleTotals(
        idle_s=sum(last - bubble.generated_at for bubble in bubbles),
        used_s=used,
        overrun_s=max(overruns, default=0.0),
        generation_s=(last - first) * len(bubbles),
    )


def bubble_metrics(bubbles: Sequence[Bubble]) -> dict[str, float]:
    """The totals of a step's bubbles under their names in MLflow."""
    found = totals(bubbles)
    return {
        "bubble/idle_s": found.idle_s,
        "bubble/used_s": found.used_s,
        "bubble/overrun_s": found.overrun_s,
        "bubble/pregenerated_tokens": float(sum(bubble.pregenerated_tokens for bubble in bubbles)),
        "bubble/drafter_steps": float(sum(bubble.drafter_steps for bubble in bubbles)),
    }


def speedup_estimates(bubbles: Sequence[Bubble], seconds: Mapping[str, float]) -> dict[str, float]:
    """By how much plain decoding would have made a step longer, under the names in MLflow; no matched pair.

    Plain decoding trains no drafter, and validations do not count. What else a drafter costs, its share of the refit,
    is left out.

    Args:
        bubbles: The bubbles of all ranks. Without an estimate for each of them, nothing is returned.
        seconds: The wall times of the step's parts.
    """
    saved = [bubble.saved_s for bubble in bubbles if bubble.saved_s is not None]
    if len(saved) < len(bubbles):
        return {}
    slowest = max(bubble.own_s for bubble in bubbles)
    longer = max(bubble.own_s + gain for bubble, gain in zip(bubbles, saved, strict=True)) - slowest
    step = seconds["step"] - seconds.get("validation", 0.0)
    return {
        "speedup/generation_estimate": 1 + longer / seconds["generation"],
        "speedup/step_estimate": (step + longer - seconds.get("drafter_update", 0.0)) / step,
    }


def tail_seconds(finish_times: Sequence[float], share: float = 0.9) -> float:
    """The seconds from when `share` of the responses were finished until the last one was; 0 without any."""
    ordered = sorted(finish_times)
    return ordered[-1] - ordered[int(share * (len(ordered) - 1))] if ordered else 0.0


def joined(spans: Sequence[Span], gap: float = 0.005) -> list[Span]:
    """The spans with those of one name that follow each other within `gap` seconds made one."""
    result: list[Span] = []
    for span in spans:
        follows = bool(result) and result[-1].name == span.name and span.started_at - result[-1].ended_at < gap
        result.append(Span(span.name, result.pop().started_at, span.ended_at) if follows else span)
    return result


def rank_spans(bubble: Bubble, timer: Sequence[Span]) -> list[Span]:
    """The spans of one rank's step: its generation and bubble, then the parts that came after.

    Args:
        bubble: The rank's bubble in the step.
        timer: The spans of the step's parts on that rank.
    """
    own = Span(GENERATION, bubble.started_at, bubble.generated_at)
    return [own, *bubble.spans, *bubble.refills, *(span for span in timer if span.name not in (GENERATION, "step"))]


def timeline_from(data: dict[str, Any]) -> RankTimeline:
    """A timeline, given what `json` reads of its `asdict` form."""
    bubble = data["bubble"]
    spans, pace = [Span(**span) for span in bubble["spans"]], [(b, n, s) for b, n, s in bubble["pace"]]
    refills = [Span(**span) for span in bubble.get("refills", ())]
    bubble = Bubble(**{**bubble, "spans": spans, "pace": pace, "refills": refills})
    return RankTimeline(bubble, [Span(**span) for span in data["spans"]])
