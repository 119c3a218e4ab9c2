"""A simulator of a step's generation on any number of ranks, from measured response lengths and iteration times.

Each rank decodes its responses together; an iteration takes a time that depends on how many are running and gives every
response some tokens, more of them where stored text is followed. Ranks that are done pre-generate for the next step as
real ones do: the same claims, longest expected first. Nothing is fitted: lengths, iterations and seconds are those of a
run, response by response.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from specrl.config.rollout import BubbleUse
from specrl.dealing import deal_longest_first
from specrl.rollout.bubbles.balance import piece

USES: tuple[BubbleUse, ...] = get_args(BubbleUse)


@dataclass(frozen=True)
class IterationCurve:
    """The time of an engine iteration by the number of running requests, at the draft lengths the controller chose."""

    points: tuple[tuple[int, float], ...]
    """Pairs of running requests and seconds, ascending in the requests."""

    def at(self, running: int) -> float:
        """Return the seconds of an iteration, on straight lines between the points and flat outside of them."""
        batches = [batch for batch, _ in self.points]
        right = bisect_left(batches, running)
        if right == 0 or right == len(batches):
            return self.points[min(right, len(batches) - 1)][1]
        (b0, t0), (b1, t1) = self.points[right - 1], self.points[right]
        return t0 + (t1 - t0) * (running - b0) / (b1 - b0)


@dataclass(frozen=True)
class DecodingSpeed:
    """How fast a run's responses grow, and how it shares its bubbles out."""

    curve: IterationCurve
    replayed_tokens: float
    """Tokens per request and iteration along stored text."""
    pregeneration_share: float = 0.9
    """Share of a bubble's time that `both` gives to pre-generation; the default is what it begins with."""


@dataclass(frozen=True)
class SimulatedResponse:
    """A response as the simulator decodes it."""

    prompt: int
    length: int
    """Number of tokens."""
    expected: float
    """The length that is expected when prompts are dealt."""
    pace: float
    """Tokens per iteration where no stored text is followed: 1 plain, more with a drafter; least where text rambles."""
    follows: float = 1.0
    """Share of its stored text that is what it samples: the rest comes after it went another way."""

    def iterations(self, stored: float, replayed_tokens: float) -> float:
        """Return how many iterations it takes with `stored` tokens of stored text to follow."""
        followed = self.follows * min(stored, self.length)
        return max(1.0, followed / replayed_tokens + (self.length - followed) / self.pace)


@dataclass
class StepTimes:
    """Seconds of one simulated step's generation."""

    generation_s: float
    """Time until the slowest rank is done."""
    idle_s: float
    """Time that ranks wait for the slowest one, summed over ranks."""
    used_s: float
    """The part of `idle_s` that is put to use."""
    iterations: float
    """Decoding steps of the rank that needs most."""
    stored: dict[tuple[int, int], float] = field(default_factory=dict)
    """Number of pre-generated tokens of each of the next step's responses, by (prompt, sample)."""


@dataclass
class _Work:
    """The decoding of responses that run together on one rank."""

    seconds: float
    iterations: float
    tokens: list[float]
    """Number of tokens of each response when time was up or it was finished."""


def decode(
    responses: Sequence[SimulatedResponse],
    stored: Sequence[float],
    speed: DecodingSpeed,
    most_running: int,
    limit: float = float("inf"),
) -> _Work:
    """Decode responses for at most `limit` seconds, with `stored` tokens of stored text for each to follow."""
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
    shares: Sequence[Sequence[SimulatedResponse]],
    following: Sequence[SimulatedResponse],
    stored: dict[tuple[int, int], float],
    speed: DecodingSpeed,
    use: BubbleUse,
    most_running: int,
) -> StepTimes:
    """Simulate one step.

    Args:
        shares: each rank's responses; those to the same prompt lie together.
        following: the next step's responses of all ranks in the order they are pre-generated; those to the same prompt
            lie together.
        stored: the number of pre-generated tokens of this step's responses, by (prompt, sample).
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
    following: Sequence[SimulatedResponse],
    speed: DecodingSpeed,
    most_running: int,
) -> None:
    """Let idle ranks claim responses of the next step, as the bubble coordinator hands them out.

    Args:
        times: for each rank, from when and until when it may pre-generate.
    """
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
    steps: Sequence[Sequence[Sequence[SimulatedResponse]]], speed: DecodingSpeed, use: BubbleUse, most_running: int
) -> list[StepTimes]:
    """Simulate all steps of a run; `steps` holds each rank's responses by step."""
    times: list[StepTimes] = []
    stored: dict[tuple[int, int], float] = {}
    for number, shares in enumerate(steps):
        after = steps[number + 1] if number + 1 < len(steps) else []
        following = [response for share in after for response in share]
        following.sort(key=lambda response: (-response.expected, response.prompt))
        times.append(simulate_step(shares, following, stored, speed, use, most_running))
        stored = times[-1].stored
    return times


def scaled(
    steps: Sequence[Sequence[Sequence[SimulatedResponse]]], ranks: int, seed: int = 0
) -> list[list[list[SimulatedResponse]]]:
    """Return the same run on more ranks, with as many prompts for each, drawn anew from all measured groups.

    Groups are dealt by expected length, the longest first. Runs on the same prompts are drawn from alike, however their
    prompts were dealt.
    """
    generator = random.Random(seed)
    groups = [group for shares in steps for group in _by_prompt(shares)]
    per_rank = len(_groups(steps[0][0]))
    return [_deal([generator.choice(groups) for _ in range(per_rank * ranks)], ranks) for _ in steps]


def _deal(groups: Sequence[Sequence[SimulatedResponse]], ranks: int) -> list[list[SimulatedResponse]]:
    expected = [group[0].expected for group in groups]
    shares = deal_longest_first(expected, ranks, room=len(groups) // ranks)
    return [[replace(item, prompt=prompt) for prompt in share for item in groups[prompt]] for share in shares]


def _by_prompt(shares: Sequence[Sequence[SimulatedResponse]]) -> list[list[SimulatedResponse]]:
    """Return a step's responses grouped by prompt, in the order of the prompts."""
    return sorted((group for share in shares for group in _groups(share)), key=lambda group: group[0].prompt)


def _groups(share: Sequence[SimulatedResponse]) -> list[list[SimulatedResponse]]:
    found: dict[int, list[SimulatedResponse]] = {}
    for response in share:
        found.setdefault(response.prompt, []).append(response)
    return list(found.values())


def _keys(responses: Sequence[SimulatedResponse]) -> list[tuple[int, int]]:
    """Return (prompt, sample) of each response, with the samples of a prompt counted in order."""
    counts: dict[int, int] = {}
    keys = []
    for response in responses:
        keys.append((response.prompt, counts.get(response.prompt, 0)))
        counts[response.prompt] = keys[-1][1] + 1
    return keys
