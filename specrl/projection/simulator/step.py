"""A simulated RL step: all GPUs generate, then all train, then the engines are refitted.

What a step generates is a `Workload`: the number of responses, their lengths, and how well they are drafted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from specrl.config import PolicyConfig
from specrl.config.rollout import BubbleUse
from specrl.projection.simulator.engine import EngineModel
from specrl.projection.simulator.generation import DecodingSpeed, Shares, SimulatedResponse, simulate
from specrl.projection.traffic import refit_cost
from specrl.schemas import Rollout, read_folder

STEPS = 3  # simulated
LONGEST = 16  # the last position whose acceptance is read from a run
AGREES = 830.0  # tokens by which a response agrees with its pre-generated text: median (benchmarks/after-update.md)


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
        return SimulatedResponse(prompt, item.tokens, own, sample)

    made = [[response(prompt, *item) for item in enumerate(group)] for prompt, group in enumerate(groups)]
    units = made if whole_groups else [[one] for group in made for one in group]
    return [list(chain(*units[engine::engines])) for engine in range(engines)]


@dataclass(frozen=True)
class Speculation:
    """How responses are drafted: `k` drafts per request and iteration, and the resulting tokens per iteration."""

    k: int = 0
    acceptance_length: float = 1.0  # including the sampled token
    bubbles: BubbleUse = "none"


def acceptance_length(rates: Sequence[float], k: int) -> float:
    """The expected tokens per iteration with k drafts, given the shares accepted at positions 1, 2, ...

    Beyond the last position, rates keep falling by the ratio of the last two, or stay if they did not fall.
    """
    known = list(rates[:k])
    factor = min(1.0, rates[-1] / rates[-2] if len(rates) > 1 else rates[-1])
    while len(known) < k:
        known.append(known[-1] * factor)
    return 1 + sum(known)


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step and its parts."""

    generation: float
    idle_share: float  # fraction of the engines' time in generation
    used_share: float  # fraction of that idle time
    logprob: float  # passes other than the update's own
    update: float
    drafter: float  # its update
    refit: float
    total: float


@dataclass(frozen=True)
class StepModel:
    engine: EngineModel
    gpus: int  # shared by all engines and the trainer
    workload: Workload
    most_running: int = 1024  # concurrent responses per engine
    logprob_passes: float = 0  # forward passes of the trainer besides the update; a larger teacher's counts as several
    policy: PolicyConfig = field(default_factory=PolicyConfig)  # its parallel sizes determine the refit
    drafter_tokens: float = 0.0  # per update of the drafter, on all GPUs together; 0 without updates
    drafter_updates: float = 1.0  # in a step
    ttt_steps: int = 7  # unrolled positions, each a forward and a backward pass
    other_s: float = 2.0  # for rewards, data and logging

    @cached_property
    def drawn(self) -> list[list[list[Drawn]]]:
        """Sample the responses of each step, prompt by prompt."""
        return self.workload.draw(STEPS, seed=0)

    def dealt(self, k: int, pace: float) -> list[list[list[SimulatedResponse]]]:
        """Deal the responses of each step to the engines; see `dealt`."""
        engines, whole_groups = max(1, self.gpus // self.engine.gpus), self.workload.whole_groups
        return [dealt(groups, engines, k, pace, whole_groups=whole_groups) for groups in self.drawn]

    def step(self, speculation: Speculation) -> StepTime:
        engine, steps = self.engine, self.dealt(speculation.k, speculation.acceptance_length)
        speed = DecodingSpeed(replace(engine, k=speculation.k).at, engine.row_s, AGREES, engine.prompt_tokens)
        learns = speculation.k > 0 and speculation.bubbles in ("none", "pregenerate")  # else it learns in idle time
        drafter_s = self.drafter_updates * self.drafter_s(self.engine) if learns else 0.0
        return self.time(steps, speed, speculation.bubbles, drafter_s=drafter_s)

    def time(
        self, steps: Sequence[Shares], speed: DecodingSpeed, use: BubbleUse = "none", *, drafter_s: float = 0.0
    ) -> StepTime:
        """The mean time of steps, given the responses of each engine."""
        # Steps are circular: the last one also precedes the first and leaves it pre-generated text.
        times = simulate([steps[-1], *steps], speed, use, self.most_running)
        seconds, idle = sum(time.seconds for time in times[1:]), sum(time.idle_s for time in times[1:])
        used, could = sum(time.used_s for time in times[:-1]), sum(time.idle_s for time in times[:-1])
        generation, idle_share = seconds / len(steps), idle / (seconds * len(steps[0]))
        logprob, update, refit = self._trainer()
        total = generation + logprob + update + drafter_s + refit + self.other_s
        return StepTime(
            generation, idle_share, used / could if could else 0.0, logprob, update, drafter_s, refit, total
        )

    def drafter_s(self, engine: EngineModel) -> float:
        """The seconds of an update of this engine's drafter."""
        flops = 3 * 2 * engine.drafter_parameters * self.ttt_steps * min(self.drafter_tokens, self._tokens)
        return flops / (self.gpus * engine.hardware.bf16_flops * engine.efficiency.dense_mfu)

    @property
    def _tokens(self) -> float:  # trained on in a step
        drawn = [item.tokens for step in self.drawn for group in step for item in group]
        return (sum(drawn) + len(drawn) * self.engine.prompt_tokens) / STEPS

    def _trainer(self) -> tuple[float, float, float]:
        shape, hardware, efficiency = self.engine.shape, self.engine.hardware, self.engine.efficiency
        mfu = efficiency.expert_mfu if shape.num_experts else efficiency.dense_mfu
        forward = 2 * shape.active_parameters * self._tokens / (self.gpus * hardware.bf16_flops * mfu)
        cost = refit_cost(shape, self.policy)
        refit = cost.seconds(between_stages=hardware.network_bandwidth, inside=hardware.link_bandwidth)
        return self.logprob_passes * forward, 3 * forward, refit
