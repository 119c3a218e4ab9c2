"""A simulated RL step: all GPUs generate, then all of them train, then the policy goes to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from specrl.config import PolicyConfig
from specrl.config.rollout import BubbleUse
from specrl.projection.simulator.engine import EngineModel
from specrl.projection.simulator.generation import DecodingSpeed, Shares, simulate
from specrl.projection.simulator.workload import Drawn, Workload, dealt
from specrl.projection.traffic import refit_cost

STEPS = 3  # that are simulated
AGREES = 830.0  # tokens of a response with its pre-generated text: a median measured (benchmarks/after-update.md)


@dataclass(frozen=True)
class Speculation:
    """How responses are drafted: `k` drafts for each request and iteration, which then gives so many tokens."""

    k: int = 0
    acceptance_length: float = 1.0  # the sampled token included
    bubbles: BubbleUse = "none"


def acceptance_length(rates: Sequence[float], k: int) -> float:
    """Add up the tokens per iteration with k drafts, of which at position 1, 2, ... such shares are accepted.

    Beyond the last one the rates go on falling by the factor between the last two.
    """
    known = list(rates[:k])
    factor = rates[-1] / rates[-2] if len(rates) > 1 else rates[-1]
    while len(known) < k:
        known.append(known[-1] * factor)
    return 1 + sum(known)


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step and its parts."""

    generation: float
    idle_share: float  # of the engines' time in generation
    used_share: float  # of that idle time
    logprob: float  # passes apart from the update's own
    update: float
    drafter: float  # its update
    refit: float
    total: float


@dataclass(frozen=True)
class StepModel:
    engine: EngineModel
    gpus: int  # of all engines and the trainer
    workload: Workload
    most_running: int = 1024  # responses of an engine at once
    logprob_passes: float = 0  # of the trainer, forward, beside the update; one of a larger teacher is several
    policy: PolicyConfig = field(default_factory=PolicyConfig)  # whose parallel sizes decide the refit
    drafter_tokens: float = 0.0  # that an update of the drafter learns from, on all GPUs together; 0 without one
    drafter_updates: float = 1.0  # in a step
    ttt_steps: int = 7  # positions that this unrolls, each a forward and a backward pass
    other_s: float = 2.0  # for rewards, data and logging

    @cached_property
    def drawn(self) -> list[list[list[Drawn]]]:
        """The responses of each step, prompt by prompt."""
        return self.workload.draw(STEPS, seed=0)

    def step(self, speculation: Speculation) -> StepTime:
        engines, pace = max(1, self.gpus // self.engine.gpus), speculation.acceptance_length
        steps = [dealt(groups, engines, speculation.k, pace) for groups in self.drawn]
        speed = DecodingSpeed((replace(self.engine, k=speculation.k).at,), self.engine.row_s, AGREES)
        learns = speculation.k > 0 and speculation.bubbles in ("none", "pregenerate")  # else it learns in idle time
        drafter_s = self.drafter_updates * self.drafter_s(self.engine) if learns else 0.0
        return self.time(steps, speed, speculation.bubbles, drafter_s=drafter_s)

    def time(
        self, steps: Sequence[Shares], speed: DecodingSpeed, use: BubbleUse = "none", *, drafter_s: float = 0.0
    ) -> StepTime:
        """Compute the mean time of steps from the responses of each engine."""
        # In a circle: the last step comes before the first one, too, and leaves it what was pre-generated.
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
        """The seconds of an update of the drafter that this engine has."""
        flops = 3 * 2 * engine.drafter_parameters * self.ttt_steps * min(self.drafter_tokens, self._tokens)
        return flops / (self.gpus * engine.hardware.bf16_flops * engine.efficiency.dense_mfu)

    @property
    def _tokens(self) -> float:  # that a step trains on
        drawn = [item.tokens for step in self.drawn for group in step for item in group]
        return (sum(drawn) + len(drawn) * self.engine.prompt_tokens) / STEPS

    def _trainer(self) -> tuple[float, float, float]:
        shape, hardware, efficiency = self.engine.shape, self.engine.hardware, self.engine.efficiency
        mfu = efficiency.expert_mfu if shape.num_experts else efficiency.dense_mfu
        forward = 2 * shape.active_parameters * self._tokens / (self.gpus * hardware.bf16_flops * mfu)
        cost = refit_cost(shape, self.policy)
        refit = cost.seconds(between_stages=hardware.network_bandwidth, inside=hardware.link_bandwidth)
        return self.logprob_passes * forward, 3 * forward, refit
