"""A simulated RL step: generation, the passes of the trainer, and the refit, on any number of GPUs.

specrl's steps are synchronous: all GPUs generate, then all of them train. Steps with a lag, in which some GPUs generate
for a later step while the others train, are simulated for comparison only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from specrl.config.rollout import BubbleUse
from specrl.models.shapes import ModelShape
from specrl.projection.refit import Layout, Links, refit_cost
from specrl.projection.simulator.hardware import Efficiency, Hardware
from specrl.projection.simulator.iteration import EngineModel
from specrl.projection.simulator.workload import Workload, dealt
from specrl.projection.tail import DecodingSpeed, simulate

STEPS = 3
"""The number of steps that are simulated; what is pre-generated helps from the second one on."""
DIVISIONS = 8
"""In a run with a lag, an eighth of the GPUs is the smallest share that is tried for generation."""
LONGEST_K = 7
"""The largest number of drafts that is simulated, unless the drafter has learned fewer positions."""
REPLAYED_TOKENS = 6.0
"""Tokens per iteration along pre-generated text, as measured at k = 7 (0.17 decoding steps per token)."""


@dataclass(frozen=True)
class Speculation:
    """How responses are drafted."""

    k: int = 0
    """The number of drafts for each request and iteration; 0 without speculation."""
    acceptance_length: float = 1.0
    """The tokens of a request per iteration, the sampled one included."""
    bubbles: BubbleUse = "none"


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, part by part."""

    generation: float
    logprob: float
    """Passes for log-probs apart from the update's own."""
    update: float
    refit: float
    other: float
    total: float
    """The whole step; less than the sum of the parts where some of them run at the same time."""


@dataclass(frozen=True)
class StepModel:
    """A run whose steps are simulated."""

    shape: ModelShape
    hardware: Hardware
    gpus: int
    engine_gpus: int
    """The number of GPUs of an engine."""
    workload: Workload
    is_fp8: bool = False
    """Whether the engine computes in FP8."""
    parallel: bool = False
    """Whether the drafter drafts all positions in one pass."""
    longest_k: int = LONGEST_K
    """The largest number of drafts that is simulated."""
    most_running: int = 1024
    """The largest number of responses that run at once on an engine."""
    prompt_tokens: int = 512
    logprob_passes: int = 0
    """The number of forward passes of the trainer beside the update: none for a single update, in specrl."""
    layout: Layout = field(default_factory=Layout)
    """How the trainer's ranks share the model, for the refit."""
    other_s: float = 2.0
    """Seconds of a step for rewards, data and logging."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    seed: int = 0

    def synchronous(self, speculation: Speculation) -> StepTime:
        """Return the mean time of a step in which all GPUs generate and then train."""
        generation = self.generation_s(speculation, self.gpus)
        logprob, update, refit = self._trainer(self.gpus)
        return StepTime(
            generation,
            logprob,
            update,
            refit,
            self.other_s,
            generation + logprob + update + refit + self.other_s,
        )

    def lagged(self, speculation: Speculation, lag: int) -> StepTime:
        """Return the mean time of a step in which the policy may be `lag` steps older than the one that is trained.

        Some GPUs generate only and the others train only, in the division that makes the step shortest. The responses
        of `lag` steps are generated together.
        """
        assert lag >= 1
        engines = self.gpus // self.engine_gpus
        shares = sorted({max(1, round(engines * part / DIVISIONS)) for part in range(1, DIVISIONS)} - {engines})
        found = [self._divided(speculation, lag, share * self.engine_gpus) for share in shares]
        return min(found, key=lambda time: time.total)

    def _divided(self, speculation: Speculation, lag: int, generating: int) -> StepTime:
        generation = self.generation_s(speculation, generating, together=lag)
        logprob, update, refit = self._trainer(self.gpus - generating)
        total = max(generation, logprob + update) + refit + self.other_s
        return StepTime(generation, logprob, update, refit, self.other_s, total)

    def generation_s(self, speculation: Speculation, gpus: int, together: int = 1) -> float:
        """Return the seconds of a step's generation, the mean over the simulated steps.

        Args:
            gpus: The number of GPUs that generate.
            together: The number of steps whose responses are generated at the same time.
        """
        engines, pace = max(1, gpus // self.engine_gpus), speculation.acceptance_length
        drawn = self.workload.draw(STEPS * together, self.seed)
        batches = [list(chain(*drawn[first : first + together])) for first in range(0, len(drawn), together)]
        cost = EngineModel(
            shape=self.shape,
            hardware=self.hardware,
            efficiency=self.efficiency,
            gpus=self.engine_gpus,
            is_fp8=self.is_fp8,
            k=speculation.k,
            parallel=self.parallel,
            prompt_tokens=self.prompt_tokens,
        )
        speed = DecodingSpeed(cost, max(REPLAYED_TOKENS, pace))
        steps = [dealt(groups, engines, pace) for groups in batches]
        times = simulate(steps, speed, speculation.bubbles, self.most_running)
        usual = times if speculation.bubbles == "none" else times[1:]
        return sum(time.generation_s for time in usual) / len(usual) / together

    @property
    def tokens(self) -> float:
        """The mean number of tokens of a step, prompts included."""
        drawn = self.workload.draw(STEPS, self.seed)
        return sum(self.prompt_tokens + length for step in drawn for group in step for length in group) / STEPS

    def _trainer(self, gpus: int) -> tuple[float, float, float]:
        """Return the seconds of log-prob passes, update and refit on so many GPUs."""
        mfu = self.efficiency.expert_mfu if self.shape.num_experts else self.efficiency.dense_mfu
        forward = 2 * self.shape.active_parameters * self.tokens / (gpus * self.hardware.bf16_flops * mfu)
        links = Links(self.hardware.network_bandwidth, self.hardware.link_bandwidth)
        refit = refit_cost(self.shape, self.layout).seconds(links, spans_nodes=self.layout.pipeline_parallel > 1)
        return self.logprob_passes * forward, 3 * forward, refit


def speedups(model: StepModel, choices: Sequence[Speculation], lag: int = 0) -> list[tuple[float, float]]:
    """Return the speedups of generation and of the step for each choice, against no speculation with the same lag."""

    def time(speculation: Speculation) -> StepTime:
        return model.lagged(speculation, lag) if lag else model.synchronous(speculation)

    plain = time(Speculation())
    found = [time(choice) for choice in choices]
    return [(plain.generation / item.generation, plain.total / item.total) for item in found]
