"""A step's generation on R simulated ranks, from measured response lengths and the measured time of an iteration.

Each rank decodes its responses together; an iteration takes `seconds(running)` and gives every response some tokens,
more of them where stored text is followed. Ranks that are done pre-generate for the next step as real ones do: the same
claims, longest expected first. Nothing is fitted: lengths, iterations and seconds are those of a run, response by
response.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, get_args

from specrl.config.rollout import BubbleUse
from specrl.rollout.bubbles.balance import piece

Use: TypeAlias = BubbleUse
USES: tuple[Use, ...] = get_args(BubbleUse)


@dataclass(frozen=True)
class Curve:
    """tau(batch): seconds of an engine iteration by running requests, at the draft lengths the controller chose."""

    points: tuple[tuple[int, float], ...]
    """Ascending in the number of requests."""

    def at(self, running: int) -> float:
        """Straight lines between the points, the nearest point outside of them."""
        batches = [batch for batch, _ in self.points]
        right = bisect_left(batches, running)
        if right == 0 or right == len(batches):
            return self.points[min(right, len(batches) - 1)][1]
        (b0, t0), (b1, t1) = self.points[right - 1], self.points[right]
        return t0 + (t1 - t0) * (running - b0) / (b1 - b0)


@dataclass(frozen=True)
class Speed:
    """How fast a run's responses grow, and how it shares its bubbles out."""

    curve: Curve
    replayed_tokens: float
    """Per request and iteration along stored text."""
    pregeneration_share: float = 0.9
    """Of a bubble's time, in `both`: what it begins with where none is measured."""


@dataclass(frozen=True)
class Response:
    prompt: int
    length: int
    """Tokens."""
    expected: float
    """What its length is expected to be when prompts are dealt."""
    pace: float
    """Tokens per iteration where no stored text is followed: 1 plain, more with a drafter; least where text rambles."""
    follows: float = 1.0
    """Share of its stored text that is what it samples: the rest comes after it went another way."""

    def iterations(self, stored: float, replayed_tokens: float) -> float:
        """It takes, with so many tokens of stored text to follow."""
        followed = self.follows * min(stored, self.length)
        return max(1.0, followed / replayed_tokens + (self.length - followed) / self.pace)


@dataclass
class StepTimes:
    """Seconds of one simulated step's generation."""

    generation_s: float
    """Of the slowest rank."""
    idle_s: float
    """Summed over ranks."""
    used_s: float
    iterations: float
    """Of the rank that needed most."""
    stored: dict[tuple[int, int], float] = field(default_factory=dict)
    """Tokens of the next step's responses that exist afterwards, by (prompt, sample)."""


@dataclass
class _Work:
    """Responses that run together on one rank."""

    seconds: float
    iterations: float
    tokens: list[float]
    """Of each response, when time was up or it was finished."""


def decode(
    responses: Sequence[Response], stored: Sequence[float], speed: Speed, most_running: int, limit: float = float("inf")
) -> _Work:
    """Decode responses, `stored` tokens of which are followed in stored text, at most `limit` seconds."""
    needs = [response.iterations(text, speed.replayed_tokens) for response, text in zip(responses, stored, strict=True)]
    waiting = list(range(len(responses)))[::-1]
    running: list[tuple[float, int]] = []  # (iteration at which it is finished, response)
    started: dict[int, float] = {}
    now = iterations = 0.0
    while (waiting or running) and now < limit:
        while waiting and len(running) < most_running:
            index = waiting.pop()
            started[index] = iterations
            heapq.heappush(running, (iterations + needs[index], index))
        seconds = speed.curve.at(len(running))
        until = running[0][0]
        if now + (until - iterations) * seconds >= limit:  # to the limit itself: a sum of steps may never get there
            now, iterations = limit, iterations + (limit - now) / seconds
            break
        now, iterations = now + (until - iterations) * seconds, until
        while running and running[0][0] <= iterations + 1e-9:
            heapq.heappop(running)
    done = [max(0.0, min(1.0, (iterations - started.get(i, iterations)) / need)) for i, need in enumerate(needs)]
    return _Work(now, iterations, [share * item.length for share, item in zip(done, responses, strict=True)])


def simulate_step(
    shares: Sequence[Sequence[Response]],
    following: Sequence[Response],
    stored: dict[tuple[int, int], float],
    speed: Speed,
    use: Use,
    most_running: int,
) -> StepTimes:
    """One step.

    Args:
        shares: each rank's responses, groups together.
        following: the next step's responses of all ranks, groups together, in the order they are pre-generated.
        stored: tokens of this step's responses that were pre-generated.
    """
    works = []
    for share in shares:
        texts = [stored.get(key, 0.0) for key in _keys(share)]
        works.append(decode(share, texts, speed, most_running))
    last = max(work.seconds for work in works)
    idle = sum(last - work.seconds for work in works)
    result = StepTimes(last, idle, 0.0, max(work.iterations for work in works))
    if use == "train_drafter":
        result.used_s = idle
    if use in ("pregenerate", "both"):
        part = speed.pregeneration_share if use == "both" else 1.0
        ready = [(work.seconds, work.seconds + part * (last - work.seconds)) for work in works]
        _pregenerate(result, ready, following, speed, most_running)
        result.used_s = idle if use == "both" else result.used_s
    return result


def _pregenerate(
    result: StepTimes,
    times: Sequence[tuple[float, float]],
    following: Sequence[Response],
    speed: Speed,
    most_running: int,
) -> None:
    """Idle ranks claim responses of the next step in the pieces of `BubbleCoordinator.claim`, each within its times."""
    ready = [(start, end) for start, end in times if start < end]
    heapq.heapify(ready)
    keys, first = _keys(following), 0
    group = sum(response.prompt == following[0].prompt for response in following) if following else 0
    while ready and first < len(following):
        now, end = heapq.heappop(ready)
        size = max(group, piece(len(following) - first, len(times)))
        chunk = range(first, min(first + size, len(following)))
        claimed = following[chunk.start : chunk.stop]
        work = decode(claimed, [0.0] * len(claimed), speed, most_running, end - now)
        for index, tokens in zip(chunk, work.tokens, strict=True):
            result.stored[keys[index]] = tokens
        result.used_s += work.seconds
        first += size
        if work.seconds < end - now:
            heapq.heappush(ready, (now + work.seconds, end))


def simulate(
    steps: Sequence[Sequence[Sequence[Response]]], speed: Speed, use: Use, most_running: int
) -> list[StepTimes]:
    """All steps of a run.

    Args:
        steps: per step each rank's responses.
    """
    times: list[StepTimes] = []
    stored: dict[tuple[int, int], float] = {}
    for number, shares in enumerate(steps):
        after = steps[number + 1] if number + 1 < len(steps) else []
        following = [response for share in after for response in share]
        following.sort(key=lambda response: (-response.expected, response.prompt))
        times.append(simulate_step(shares, following, stored, speed, use, most_running))
        stored = times[-1].stored
    return times


def scaled(steps: Sequence[Sequence[Sequence[Response]]], ranks: int, seed: int = 0) -> list[list[list[Response]]]:
    """The same run on more ranks: as many prompts for each as there were, drawn anew from all measured groups.

    Dealt by expected length, longest first, to the rank with the least to do that has room. Runs on the same prompts
    are drawn from alike, however they were dealt.
    """
    generator = random.Random(seed)
    groups = [group for shares in steps for group in _by_prompt(shares)]
    per_rank = len(_groups(steps[0][0]))
    return [_deal([generator.choice(groups) for _ in range(per_rank * ranks)], ranks) for _ in steps]


def _deal(groups: Sequence[Sequence[Response]], ranks: int) -> list[list[Response]]:
    room = len(groups) // ranks
    queue = [(0.0, rank, 0) for rank in range(ranks)]
    shares: list[list[Response]] = [[] for _ in range(ranks)]
    order = sorted(range(len(groups)), key=lambda index: -groups[index][0].expected)
    for prompt in order:
        load, rank, count = heapq.heappop(queue)
        shares[rank] += [replace(item, prompt=prompt) for item in groups[prompt]]
        if count + 1 < room:
            heapq.heappush(queue, (load + groups[prompt][0].expected, rank, count + 1))
    return shares


def _by_prompt(shares: Sequence[Sequence[Response]]) -> list[list[Response]]:
    """A step's groups."""
    return sorted((group for share in shares for group in _groups(share)), key=lambda group: group[0].prompt)


def _groups(share: Sequence[Response]) -> list[list[Response]]:
    found: dict[int, list[Response]] = {}
    for response in share:
        found.setdefault(response.prompt, []).append(response)
    return list(found.values())


def _keys(responses: Sequence[Response]) -> list[tuple[int, int]]:
    """(prompt, sample) of each, samples counted in order."""
    counts: dict[int, int] = {}
    keys = []
    for response in responses:
        keys.append((response.prompt, counts.get(response.prompt, 0)))
        counts[response.prompt] = keys[-1][1] + 1
    return keys
