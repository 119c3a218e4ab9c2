"""What a step generates: the number of responses, their lengths, and how well they are drafted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from specrl.projection.simulator.generation import SimulatedResponse
from specrl.schemas import Rollout, read_folder

LONGEST = 16  # the last position whose acceptance is read from a run


class Drawn(NamedTuple):
    tokens: int
    gain: float = 1.0  # its accepted drafts per iteration, relative to all responses


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens: log-normal, cut at a limit, correlated among responses to one prompt."""

    median: float
    spread: float  # the standard deviation of the logarithm
    limit: int
    alike: float = 0.5  # the between-prompt share of the logarithm's variance

    def draw(self, prompts: int, samples: int, generator: np.random.Generator) -> list[list[Drawn]]:
        common = math.sqrt(self.alike) * generator.standard_normal((prompts, 1))
        own = math.sqrt(1 - self.alike) * generator.standard_normal((prompts, samples))
        drawn = np.clip((self.median * np.exp(self.spread * (common + own))).round(), 1, self.limit).astype(int)
        return [[Drawn(tokens) for tokens in group] for group in drawn.tolist()]

    def __str__(self) -> str:
        return f"log-normal with median {self.median:.0f} and spread {self.spread:g}, at most {self.limit} tokens"


def _accepted_per_other(row: Rollout) -> float:
    return row.num_accepted_tokens / max(1, row.num_sampled - row.num_accepted_tokens)


@dataclass(frozen=True)
class MeasuredRun:
    """The responses of a finished run, prompt by prompt, and measurements of them."""

    groups: tuple[tuple[Drawn, ...], ...]
    acceptance: tuple[float, ...]  # share of drafts accepted at positions 1, 2, ...
    generation_s: float  # of a step, on average

    @classmethod
    def read(cls, steps_dir: Path, rollouts_dir: Path) -> MeasuredRun:
        """Read the records of a run's steps and its rollouts; raise `ValueError` if there are none."""
        records = [json.loads(path.read_text())["metrics"] for path in sorted(steps_dir.glob("step=*.json"))]
        rows = list(read_folder(rollouts_dir))
        if not records or not rows:
            raise ValueError(f"no RL steps in {steps_dir}: the run has not trained yet, or its rollouts are gone")
        # With text of its own seed, a response's accepted tokens were mostly verified ahead and never drafted.
        drafted = [row for row in rows if not row.own_stored_tokens]
        others = sum(row.num_sampled - row.num_accepted_tokens for row in drafted)
        usual = sum(row.num_accepted_tokens for row in drafted) / max(1, others)
        groups: dict[tuple[int, int], list[Drawn]] = {}
        for row in rows:
            gain = _accepted_per_other(row) / usual if usual and not row.own_stored_tokens else 1.0
            groups.setdefault((row.step, row.prompt_id), []).append(Drawn(row.num_sampled, gain))
        # If a run chooses k, drafts that do not reach a position count as rejected there, so rates fall.
        names = [f"spec/acceptance_rate_pos_{position}" for position in range(1, LONGEST + 1)]
        rates = [fmean(record.get(name, 0.0) for record in records) for name in names]
        return cls(
            tuple(tuple(group) for group in groups.values()),
            tuple(rate for rate in rates if rate > 0),
            fmean(record["timing/generation_s"] for record in records),
        )

    def draw(self, prompts: int, samples: int, generator: np.random.Generator) -> list[list[Drawn]]:
        # A prompt with too few responses repeats them.
        chosen = generator.integers(len(self.groups), size=prompts)
        return [[group[i % len(group)] for i in range(samples)] for group in (self.groups[i] for i in chosen)]

    def __str__(self) -> str:
        lengths = sorted(item.tokens for group in self.groups for item in group)
        return f"drawn from {len(lengths)} of a run, with a median of {lengths[len(lengths) // 2]} tokens"


Responses = Lengths | MeasuredRun


@dataclass(frozen=True)
class Workload:
    prompts: int
    samples: int  # of each prompt
    lengths: Responses
    whole_groups: bool = False  # whether one engine generates all responses to a prompt, as in most other systems

    def draw(self, steps: int, seed: int) -> list[list[list[Drawn]]]:
        generator = np.random.default_rng(seed)
        return [self.lengths.draw(self.prompts, self.samples, generator) for _ in range(steps)]


def dealt(
    groups: Sequence[Sequence[Drawn]], engines: int, k: int, pace: float, *, whole_groups: bool = False
) -> list[list[SimulatedResponse]]:
    """Deal responses to engines in turn, as training does, or whole groups of them.

    `pace` is the mean number of tokens per response and iteration with k drafts.
    """

    def response(prompt: int, sample: int, item: Drawn) -> SimulatedResponse:
        own = min(1 + item.gain * (pace - 1), max(k + 1.0, pace))
        return SimulatedResponse(prompt, item.tokens, (own,), sample)

    made = [[response(prompt, *item) for item in enumerate(group)] for prompt, group in enumerate(groups)]
    dealt = made if whole_groups else [[one] for group in made for one in group]
    return [list(chain(*dealt[engine::engines])) for engine in range(engines)]
