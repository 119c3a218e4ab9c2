"""A simulator of a step's generation on any number of ranks, from measured response lengths and iteration times.

Each rank decodes its responses together. An iteration takes a time that depends on how many are running, and gives
every response some tokens, more of them where it follows stored text. Ranks that have finished pre-generate for the
next step as real ones do: they claim responses in the same pieces, those that are expected to be longest first. Nothing
is fitted; lengths, iterations and seconds are those of a run, response by response.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, get_args

from specrl.config.rollout import BubbleUse
from specrl.data.dealing import deal_longest_first
from specrl.rollout.bubbles.balance import piece

USES: tuple[BubbleUse, ...] = get_args(BubbleUse)
"""All values of `bubbles.use`."""


class IterationCost(Protocol):
    """The time of an engine iteration."""

    def at(self, running: int, generated: float, drafted: float) -> float:
        """Return the seconds of an iteration.

        Args:
            running: The number of running requests.
            generated: The mean number of tokens that they have generated so far.
            drafted: The mean number of tokens that are drafted for each of them.
        """


@dataclass(frozen=True)
class IterationCurve:
    """The measured time of an iteration by the number of running requests, at the draft lengths that were chosen."""

    points: tuple[tuple[int, float], ...]
    """Pairs of running requests and seconds, ascending in the requests."""

    def at(self, running: int, generated: float = 0.0, drafted: float = 0.0) -> float:
        """Return the seconds of an iteration, on straight lines between the points and flat outside of them.

        How much was generated and drafted is not looked at: it is in what was measured.
        """
        batches = [batch for batch, _ in self.points]
        right = bisect_left(batches, running)
        if right == 0 or right == len(batches):
            return self.points[min(right, len(batches) - 1)][1]
        (b0, t0), (b1, t1) = self.points[right - 1], self.points[right]
        return t0 + (t1 - t0) * (running - b0) / (b1 - b0)


@dataclass(frozen=True)
class DecodingSpeed:
    """How fast a run decodes its responses, and how it divides its idle time."""

    curve: IterationCost
    """The time of an iteration."""
    replayed_tokens: float
    """Tokens per request and iteration along stored text."""
    replayed_drafts: float = 0.0
    """The mean number of tokens that are drafted for a request in an iteration along stored text."""
    pregeneration_share: float = 0.9
    """The share of a bubble that `bubbles.use = "both"` gives to pre-generation; the default is the initial share."""


@dataclass(frozen=True)
class SimulatedResponse:
    """A response as the simulator decodes it."""

    prompt: int
    """The id of its prompt."""
    length: int
    """The number of its tokens."""
    expected: float
    """The length that is expected when prompts are dealt, in tokens."""
    pace: float
    """Tokens per iteration where it does not follow stored text: 1 without speculation, more with it."""
    follows: float = 1.0
    """The share of its stored text that it samples again before it diverges."""
    drafts: float = 0.0
    """The mean number of tokens that are drafted for it in an iteration where it does not follow stored text."""

    def iterations(self, stored: float, replayed_tokens: float) -> float:
        """Return how many iterations it takes.

        Args:
            stored: The number of tokens of its stored text.
            replayed_tokens: `DecodingSpeed.replayed_tokens`.
        """
        followed = self.follows * min(stored, self.length)
        return max(1.0, followed / replayed_tokens + (self.length - followed) / self.pace)

    def mean_drafts(self, stored: float, speed: DecodingSpeed) -> float:
        """Return how many tokens are drafted for it in an iteration, with so many tokens of stored text."""
        along = self.follows * min(stored, self.length) / speed.replayed_tokens
        share = min(1.0, along / self.iterations(stored, speed.replayed_tokens))
        return share * speed.replayed_drafts + (1 - share) * self.drafts


@dataclass
class StepTimes:
    """The result of simulating one step's generation."""

    generation_s: float
    """The seconds until the slowest rank has finished."""
    idle_s: float
    """The seconds that ranks wait for the slowest one, summed over ranks."""
    used_s: float
    """The part of `idle_s` that is put to use."""
    iterations: float
    """The decoding steps of the rank that needs most."""
    stored: dict[tuple[int, int], float] = field(default_factory=dict)
    """The number of pre-generated tokens of each of the next step's responses, by (prompt, sample)."""


@dataclass
class Decoding:
    """The result of decoding responses together on one rank."""

    seconds: float
    """The time it took."""
    iterations: float
    """The number of iterations."""
    tokens: list[float]
    """The number of tokens of each response at the end."""


def decode(
    responses: Sequence[SimulatedResponse],
    stored: Sequence[float],
    speed: DecodingSpeed,
    most_running: int,
    limit: float = float("inf"),
) -> Decoding:
    """Simulate the decoding of responses together on one rank.

    Args:
        stored: The number of tokens of stored text that each response has to follow.
        most_running: The largest number of responses that run at once, `engine.max_num_seqs`.
        limit: The seconds after which decoding stops.
    """
    needs = [response.iterations(text, speed.replayed_tokens) for response, text in zip(responses, stored, strict=True)]
    drafts = [response.mean_drafts(text, speed) for response, text in zip(responses, stored, strict=True)]
    waiting = list(range(len(responses)))[::-1]
    running: list[tuple[float, int]] = []  # (iteration at which the response is finished, its index)
    paces = [item.length / need for item, need in zip(responses, needs, strict=True)]
    started: dict[int, float] = {}
    now = iterations = drafted = 0.0
    pace = missed = 0.0  # the running requests have generated pace * iterations - missed tokens
    while (waiting or running) and now < limit:
        while waiting and len(running) < most_running:
            index = waiting.pop()
            started[index] = iterations
            pace, missed = pace + paces[index], missed + paces[index] * iterations
            drafted += drafts[index]
            heapq.heappush(running, (iterations + needs[index], index))
        halfway = (iterations + running[0][0]) / 2
        seconds = speed.curve.at(len(running), (pace * halfway - missed) / len(running), drafted / len(running))
        until = running[0][0]
        if now + (until - iterations) * seconds >= limit:  # set the limit itself, which sums of steps may never reach
            now, iterations = limit, iterations + (limit - now) / seconds
            break
        now, iterations = now + (until - iterations) * seconds, until
        while running and running[0][0] <= iterations + 1e-9:
            _, index = heapq.heappop(running)
            pace, missed = pace - paces[index], missed - paces[index] * started[index]
            drafted -= drafts[index]
    done = [max(0.0, min(1.0, (iterations - started.get(i, iterations)) / need)) for i, need in enumerate(needs)]
    return Decoding(now, iterations, [share * item.length for share, item in zip(done, responses, strict=True)])


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
        shares: The responses of each rank; those to the same prompt are adjacent.
        following: The next step's responses of all ranks, in the order in which they are pre-generated; those to the
            same prompt are adjacent.
        stored: The number of pre-generated tokens of this step's responses, by (prompt, sample).
        use: `bubbles.use`.
        most_running: The largest number of responses that run at once on a rank, `engine.max_num_seqs`.
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
    """Add to `result` what idle ranks pre-generate, when they claim responses as from the bubble coordinator.

    Args:
        times: For each rank, the time from which and the time until which it may pre-generate, in seconds.
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
    """Simulate all steps of a run.

    Args:
        steps: The responses of each step and rank; those to the same prompt are adjacent.
        use: `bubbles.use`.
        most_running: The largest number of responses that run at once on a rank, `engine.max_num_seqs`.
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


def scaled(
    steps: Sequence[Sequence[Sequence[SimulatedResponse]]], ranks: int, seed: int = 0
) -> list[list[list[SimulatedResponse]]]:
    """Return a run on `ranks` ranks with as many prompts for each rank, drawn from all measured groups of responses.

    Groups are dealt by expected length, the longest first. From two runs on the same prompts the same groups are drawn,
    however they were dealt to ranks.

    Args:
        steps: The responses of each step and rank of the measured run.
    """
    generator = random.Random(seed)
    groups = [group for shares in steps for group in _by_prompt(shares)]
    per_rank = len(_groups(steps[0][0]))
    return [_deal([generator.choice(groups) for _ in range(per_rank * ranks)], ranks) for _ in steps]


def _deal(groups: Sequence[Sequence[SimulatedResponse]], ranks: int) -> list[list[SimulatedResponse]]:
    """Return the responses of each rank when groups are dealt by expected length; prompts are numbered anew."""
    expected = [group[0].expected for group in groups]
    shares = deal_longest_first(expected, ranks, room=len(groups) // ranks)
    return [[replace(item, prompt=prompt) for prompt in share for item in groups[prompt]] for share in shares]


def _by_prompt(shares: Sequence[Sequence[SimulatedResponse]]) -> list[list[SimulatedResponse]]:
    """Return a step's responses grouped by prompt, in the order of the prompts."""
    return sorted((group for share in shares for group in _groups(share)), key=lambda group: group[0].prompt)


def _groups(share: Sequence[SimulatedResponse]) -> list[list[SimulatedResponse]]:
    """Return a rank's responses grouped by prompt."""
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
