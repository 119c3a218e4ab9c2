"""A simulated RL step: all GPUs generate, then all train, then the engines are refitted."""

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

STEPS = 3  # simulated
AGREES = 830.0  # tokens by which a response agrees with its pre-generated text: median (benchmarks/after-update.md)


@dataclass(frozen=True)
class Speculation:
    """How responses are drafted: `k` drafts per request and iteration, and the resulting tokens per iteration."""

    k: int = 0
    acceptance_length: float = 1.0  # including the sampled token
    bubbles: BubbleUse = "none"


def acceptance_length(rates: Sequence[float], k: int) -> float:
    """The expected tokens per iteration with k drafts, given the shares accepted at positions 1, 2, ...

    Beyond the last position, rates keep falling by the ratio of the last two.
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

    def step(self, speculation: Speculation) -> StepTime:
        engines, pace = max(1, self.gpus // self.engine.gpus), speculation.acceptance_length
        whole_groups, engine = self.workload.whole_groups, self.engine
        steps = [dealt(groups, engines, speculation.k, pace, whole_groups=whole_groups) for groups in self.drawn]
        speed = DecodingSpeed((replace(engine, k=speculation.k).at,), engine.row_s, AGREES, engine.prompt_tokens)
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
