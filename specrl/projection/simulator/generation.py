"""Generation of a step on any number of engines: the tail of long responses, and what idle engines do meanwhile.

Each engine decodes its responses together. An iteration takes a time that depends on how many are running, and gives
every response some tokens, more of them where it follows stored text. Engines that have finished pre-generate for the
next step as real ones do: they claim responses in the same pieces, in the order of the prompts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from specrl.config.rollout import BubbleUse
from specrl.data.dealing import piece


@dataclass(frozen=True)
class DecodingSpeed:
    iteration_s: Callable[[int, float], float]  # by the number of running requests and the mean of their tokens so far
    replayed_tokens: float  # per request and iteration along stored text


@dataclass(frozen=True)
class SimulatedResponse:
    """A response as it is decoded; lengths are in tokens."""

    prompt: int
    length: int
    pace: float  # tokens per iteration where it does not follow stored text
    sample: int = 0  # among the responses to its prompt

    def iterations(self, stored: float, replayed_tokens: float) -> float:
        followed = min(stored, self.length)
        return max(1.0, followed / replayed_tokens + (self.length - followed) / self.pace)


@dataclass
class GenerationTime:
    seconds: float  # until the slowest engine has finished
    idle_s: float  # that engines wait for the slowest one, summed over engines
    used_s: float  # of `idle_s`, put to use
    iterations: float  # of the engine that needs most
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
    needs = [response.iterations(text, speed.replayed_tokens) for response, text in zip(responses, stored, strict=True)]
    paces = [item.length / need for item, need in zip(responses, needs, strict=True)]
    waiting = list(range(len(responses)))[::-1]
    running: list[tuple[float, int]] = []  # (iteration at which the response is finished, its index)
    started: dict[int, float] = {}
    now = iterations = 0.0
    pace = missed = 0.0  # the running requests have generated pace * iterations - missed tokens
    while (waiting or running) and now < limit:
        while waiting and len(running) < most_running:
            index = waiting.pop()
            started[index] = iterations
            pace, missed = pace + paces[index], missed + paces[index] * iterations
            heapq.heappush(running, (iterations + needs[index], index))
        until = running[0][0]
        halfway = (iterations + until) / 2
        seconds = speed.iteration_s(len(running), (pace * halfway - missed) / len(running))
        if now + (until - iterations) * seconds >= limit:  # set the limit itself, which sums of steps may never reach
            now, iterations = limit, iterations + (limit - now) / seconds
            break
        now, iterations = now + (until - iterations) * seconds, until
        while running and running[0][0] <= iterations + 1e-9:
            _, index = heapq.heappop(running)
            pace, missed = pace - paces[index], missed - paces[index] * started[index]
    done = [max(0.0, min(1.0, (iterations - started.get(i, iterations)) / need)) for i, need in enumerate(needs)]
    return Decoding(now, iterations, [share * item.length for share, item in zip(done, responses, strict=True)])


def simulate(
    steps: Sequence[Sequence[Sequence[SimulatedResponse]]], speed: DecodingSpeed, use: BubbleUse, most_running: int
) -> list[GenerationTime]:
    """Simulate the generation of consecutive steps, with the responses of each engine, those to a prompt adjacent."""
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
            following = sorted(chain(*after), key=lambda response: response.prompt)
            ready = [work.seconds for work in works]
            stored, used = _pregenerate(ready, last, following, speed, most_running)
            times[-1].stored, times[-1].used_s = stored, max(used, times[-1].used_s)
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
