"""A simulated RL step: generation, the passes of the trainer, and the refit, on any number of GPUs.

specrl's steps are synchronous: all GPUs generate, then all of them train. Steps with a lag, in which some GPUs generate
for a later step while the others train, are simulated only to compare with published ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from specrl.config.rollout import BubbleUse
from specrl.projection.refit import Layout, refit_cost
from specrl.projection.simulator.engine import EngineModel
from specrl.projection.simulator.generation import DecodingSpeed, simulate
from specrl.projection.simulator.workload import Workload, dealt

STEPS = 3  # that are simulated
DIVISIONS = 8  # with a lag, an eighth of the GPUs is the smallest share that is tried for generation
LONGEST_K = 7
REPLAYED_TOKENS = 6.0  # an iteration along pre-generated text: 0.17 decoding steps per token, measured at k = 7


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
    refit: float
    total: float  # less than the sum of the parts where some of them run at the same time


@dataclass(frozen=True)
class StepModel:
    engine: EngineModel
    gpus: int  # of all engines and the trainer
    workload: Workload
    longest_k: int = LONGEST_K
    most_running: int = 1024  # responses of an engine at once
    logprob_passes: int = 0  # of the trainer, forward, beside the update
    layout: Layout = field(default_factory=Layout)  # of the trainer, for the refit
    other_s: float = 2.0  # for rewards, data and logging
    seed: int = 0

    def synchronous(self, speculation: Speculation) -> StepTime:
        return self._step(speculation, self.gpus)

    def lagged(self, speculation: Speculation, lag: int) -> StepTime:
        """Divide the GPUs among generation and training so that the step is shortest.

        The policy that generates may be `lag` steps older, whose responses are generated together.
        """
        assert lag >= 1
        engines = self.gpus // self.engine.gpus
        shares = sorted({max(1, round(engines * part / DIVISIONS)) for part in range(1, DIVISIONS)} - {engines})
        found = [self._step(speculation, share * self.engine.gpus, lag) for share in shares]
        return min(found, key=lambda time: time.total)

    def _step(self, speculation: Speculation, generating: int, lag: int = 0) -> StepTime:
        generation, idle, used = self.generation(speculation, generating, together=max(lag, 1))
        logprob, update, refit = self._trainer(self.gpus - generating if lag else self.gpus)
        training = logprob + update
        busy = max(generation, training) if lag else generation + training
        return StepTime(generation, idle, used, logprob, update, refit, busy + refit + self.other_s)

    def generation(self, speculation: Speculation, gpus: int, together: int = 1) -> tuple[float, float, float]:
        """Compute the seconds of a step's generation, the share of idle time, and how much of that is used."""
        engines, pace = max(1, gpus // self.engine.gpus), speculation.acceptance_length
        drawn = self.workload.draw(STEPS * together, self.seed)
        batches = [list(chain(*drawn[first : first + together])) for first in range(0, len(drawn), together)]
        speed = DecodingSpeed(replace(self.engine, k=speculation.k).at, max(REPLAYED_TOKENS, pace))
        steps = [dealt(groups, engines, speculation.k, pace) for groups in batches]
        # In a circle: the last step comes before the first one, too, and leaves it what was pre-generated.
        times = simulate([steps[-1], *steps], speed, speculation.bubbles, self.most_running)
        seconds, idle = sum(time.seconds for time in times[1:]), sum(time.idle_s for time in times[1:])
        used, could = sum(time.used_s for time in times[:-1]), sum(time.idle_s for time in times[:-1])
        return seconds / len(steps) / together, idle / (seconds * engines), used / could if could else 0.0

    def _trainer(self, gpus: int) -> tuple[float, float, float]:
        shape, hardware, efficiency = self.engine.shape, self.engine.hardware, self.engine.efficiency
        drawn = [item.tokens for step in self.workload.draw(STEPS, self.seed) for group in step for item in group]
        tokens = (sum(drawn) + len(drawn) * self.engine.prompt_tokens) / STEPS
        mfu = efficiency.expert_mfu if shape.num_experts else efficiency.dense_mfu
        forward = 2 * shape.active_parameters * tokens / (gpus * hardware.bf16_flops * mfu)
        cost = refit_cost(shape, self.layout)
        refit = cost.seconds(between_stages=hardware.network_bandwidth, inside=hardware.link_bandwidth)
        return self.logprob_passes * forward, 3 * forward, refit
