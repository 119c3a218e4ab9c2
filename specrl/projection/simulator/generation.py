"""Generation in a step on any number of engines: the tail of long responses, and what idle engines do meanwhile.

Each engine decodes its responses as one batch. An iteration's duration depends on the number of running responses, and
each of them gains some tokens. Engines that have finished pre-generate for the next step as real ones do: they claim
responses in the same pieces, in the order of the prompts. In the next step, a response starts with its pre-generated
text, which is verified many tokens at a time, like a prompt.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from specrl.config.rollout import BubbleUse
from specrl.data.dealing import piece

FIRST_READ = 64
"""The tokens of a stored text that are verified first (`own_text.FIRST`)."""
Seconds = Callable[[int, float], float]
"""The seconds of an iteration, by the number of running requests and the mean of their tokens so far."""


@dataclass(frozen=True)
class DecodingSpeed:
    seconds: Seconds
    read_s: float = 0.0  # per token of stored text that is verified ahead
    carried: float = float("inf")  # tokens for which a response agrees with its stored text, if both are that long
    prompt_tokens: float = 0.0  # of each prompt, which an engine reads once


@dataclass(frozen=True)
class SimulatedResponse:
    """A response in decoding; lengths are in tokens."""

    prompt: int
    length: int
    pace: float  # tokens per iteration
    sample: int = 0  # index among the responses to its prompt


Shares = Sequence[Sequence[SimulatedResponse]]  # each engine's responses in a step


@dataclass
class GenerationTime:
    seconds: float  # until the slowest engine has finished
    idle_s: float  # waiting for the slowest engine, summed over engines
    used_s: float  # the part of `idle_s` that is used
    iterations: float  # of the engine that needs the most
    stored: dict[tuple[int, int], float] = field(default_factory=dict)  # tokens for the next step, by (prompt, sample)


@dataclass(frozen=True)
class Decoding:
    seconds: float
    iterations: float
    tokens: list[float]  # of each response at the end


def decode(
    responses: Sequence[SimulatedResponse],
    stored: Sequence[float],
    speed: DecodingSpeed,
    most_running: int,
    limit: float = float("inf"),
) -> Decoding:
    """Decode responses together on one engine, at most `most_running` at once and for `limit` seconds.

    `stored` are the tokens of stored text that each response has to follow.
    """
    tokens = [min(text, speed.carried, item.length) for item, text in zip(responses, stored, strict=True)]
    # Until the text ends, or until as much again was verified in vain; at least the first part.
    read = (min(text, max(FIRST_READ, 2 * agreed)) for text, agreed in zip(stored, tokens, strict=True))
    now = speed.read_s * (sum(read) + speed.prompt_tokens * len({item.prompt for item in responses}))
    waiting = list(range(len(responses)))[::-1]
    running: list[tuple[float, int]] = []  # (iteration at which the response is finished, its index)
    since = [0.0] * len(responses)  # the iteration at which a response began
    iterations = generated = together = 0.0  # `together`: tokens per iteration of all running requests
    while (waiting or running) and now < limit:
        while waiting and len(running) < most_running:
            index = waiting.pop()
            response = responses[index]
            since[index] = iterations
            together += response.pace
            generated += tokens[index]
            heapq.heappush(running, (iterations + (response.length - tokens[index]) / response.pace, index))
        ahead = running[0][0] - iterations
        seconds = speed.seconds(len(running), (generated + together * ahead / 2) / len(running))
        if now + ahead * seconds >= limit:  # the limit itself: rounding may keep the sum below it for ever
            now, iterations = limit, iterations + (limit - now) / seconds
            break
        now, iterations, generated = now + ahead * seconds, running[0][0], generated + together * ahead
        while running and running[0][0] <= iterations + 1e-9:
            _, index = heapq.heappop(running)
            tokens[index] = responses[index].length
            together -= responses[index].pace
            generated -= responses[index].length
    for _, index in running:
        tokens[index] += responses[index].pace * (iterations - since[index])
    return Decoding(now, iterations, tokens)


def simulate(steps: Sequence[Shares], speed: DecodingSpeed, use: BubbleUse, most_running: int) -> list[GenerationTime]:
    """Simulate the generation of consecutive steps."""
    times: list[GenerationTime] = []
    stored: dict[tuple[int, int], float] = {}
    for number, shares in enumerate(steps):
        texts = [[stored.get((item.prompt, item.sample), 0.0) for item in share] for share in shares]
        works = [decode(*work, speed, most_running) for work in zip(shares, texts, strict=True)]
        last = max(work.seconds for work in works)
        idle = sum(last - work.seconds for work in works)
        iterations = max(work.iterations for work in works)
        times.append(GenerationTime(last, idle, idle if use in ("train_drafter", "both") else 0.0, iterations))
        if use in ("pregenerate", "both"):
            after = steps[number + 1] if number + 1 < len(steps) else []
            following = sorted(chain(*after), key=lambda response: (response.prompt, response.sample))
            ready = [work.seconds for work in works]
            stored, used = _pregenerate(ready, last, following, speed, most_running)
            times[-1].stored, times[-1].used_s = stored, min(max(used, times[-1].used_s), idle)
    return times


def _pregenerate(
    ready: list[float],
    last: float,
    following: Sequence[SimulatedResponse],
    speed: DecodingSpeed,
    most_running: int,
) -> tuple[dict[tuple[int, int], float], float]:
    stored: dict[tuple[int, int], float] = {}
    ready, first, used, num_engines = [start for start in ready if start < last], 0, 0.0, len(ready)
    heapq.heapify(ready)
    group = sum(response.prompt == following[0].prompt for response in following) if following else 0
    while ready and first < len(following):
        now = heapq.heappop(ready)
        claimed = following[first : first + max(group, piece(len(following) - first, num_engines))]
        work = decode(claimed, [0.0] * len(claimed), speed, most_running, last - now)
        stored |= {(item.prompt, item.sample): tokens for item, tokens in zip(claimed, work.tokens, strict=True)}
        first, used = first + len(claimed), used + work.seconds
        if work.seconds < last - now:
            heapq.heappush(ready, now + work.seconds)
    return stored, used
