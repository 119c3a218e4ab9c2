"""Scores one response outside a run, so that users can try their reward."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from specrl.config import Config, ConfigError
from specrl.data.answers import close_thoughts
from specrl.data.held_out import make_problems
from specrl.data.problems import Prompt, fit_all
from specrl.data.rendering import CHAT, Rendering, check_template, in_format
from specrl.data.rewards.functions import is_built_in, shortened, weighted
from specrl.data.rewards.pool import FailureTally, RewardError, RewardPool, Scores, describe

SHOWN = 400  # characters of a problem


@dataclass(frozen=True)
class Trial:
    problem: int
    question: str
    answer: str
    score: float | None  # as in a run: None if the reward, or a part of it, returned None
    parts: dict[str, float | None]  # unweighted parts of the score, if any
    error: str | None  # why the reward failed
    seconds: float  # without importing the reward

    def lines(self) -> list[str]:
        """The lines for a terminal, with control characters escaped."""
        parts = [f"{name} {'none' if value is None else format(value, 'g')}" for name, value in self.parts.items()]
        return [
            f"problem {self.problem}: {shortened(self.question, SHOWN)}",
            f"answer: {shortened(self.answer, SHOWN)}",
            f"score: {'none, it leaves the response out,' if self.score is None else format(self.score, 'g')} in "
            f"{self.seconds:.3f} s",
            *([f"parts: {', '.join(parts)}"] if parts else []),
            *([] if self.error is None else [f"failed: the reward {self.error}"]),
        ]


def try_reward(config: Config, response: str, number: int, tokenizer: Any = None) -> Trial:
    """Score a response to a training problem, given by number; a chat template needs the policy's tokenizer."""
    check_template(config.data.template)
    problem = make_problems(config, fit_all).draw("train", number, 1)[0]
    messages = [*problem.context, {"role": "user", "content": problem.question}]
    if tokenizer is not None:
        text = Rendering(config, tokenizer).opening(messages)
    else:
        text = problem.question if config.data.template == CHAT else in_format(config.data.template, messages)
    prompt = Prompt(0, text, [], problem.answer, problem.metadata)
    with closing(RewardPool(config.data, environment=config.environment.name)) as pool:
        pool.wait_until_ready()
        started = time.perf_counter()
        try:
            scores = _scored(pool, [(prompt, response if pool.environment is None else (response,))])
        except RewardError as reason:
            raise ConfigError(str(reason)) from reason
        seconds = time.perf_counter() - started
    score, *values = (None if math.isnan(value) else value for value in (*scores.rewards, *scores.parts[0]))
    parts = dict(zip(config.data.part_names, values, strict=False))
    error = next((failure.reason for failure in scores.failures), None)
    return Trial(number, problem.question, problem.answer, score, parts, error, seconds)


def doubtful_references(config: Config, demonstrations: Sequence[tuple[Prompt, str]]) -> list[str]:
    """Lines about references that, stated verbatim, make the reward fail or earn less than full reward."""
    found = list({(prompt.text, prompt.answer): (prompt, text) for prompt, text in demonstrations}.values())
    # A reference of `code` is its tests, which no program passes that is their text.
    right = weighted(config.data.part_weights, [float(part.name != "code") for part in config.data.reward])
    with closing(RewardPool(config.data)) as pool:
        scores = _scored(pool, found)
        lost = [prompt for (prompt, _), reward in zip(found, scores.rewards, strict=True) if reward != right]
        if not is_built_in(config.data):  # a user's reward may want the answer alone
            alone = _scored(pool, [(prompt, close_thoughts(prompt.text, prompt.answer)) for prompt in lost]).rewards
            lost = [prompt for prompt, reward in zip(lost, alone, strict=True) if reward != right]
    failures = FailureTally.of(scores.failures)
    lines = [f"data.reward = {config.data.reward_words!r}: {describe(failures, len(found))}"] if failures.count else []
    if not lost:
        return lines
    columns = zip(config.data.part_names, zip(*scores.parts, strict=True), strict=False)
    means = ", ".join(f"{name} {fmean(values):g}" for name, values in columns)
    return [
        *lines,
        f"{len(lost)} of the {len(found)} references looked at do not earn {right:g} by data.reward = "
        f"{config.data.reward_words!r} when they are stated as the answer: no response can be right, or the reward "
        f"asks for another form{f' (mean of its parts: {means})' if means else ''}; the first one: "
        f"{shortened(lost[0].answer)!r}",
    ]


def _scored(pool: RewardPool, asked: Sequence[tuple[Prompt, str | tuple[str, ...]]]) -> Scores:
    scoring = pool.begin(pool.config)
    for number, (prompt, response) in enumerate(asked):
        scoring.submit(number, prompt, response)
    return scoring.wait(logs=False)
