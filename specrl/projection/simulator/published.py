"""Published speedups beside those that the simulator finds for the same settings.

Iso et al. 2026, "Accelerating RL Post-Training Rollouts via System-Integrated Speculative Decoding" (arXiv:2604.26779):
measured steps of Qwen3-8B on 32 GB200, and projections of Qwen3-235B-A22B in FP8 with 4,096 responses a step.

The paper gives neither response lengths nor layouts. Lengths and the number of 8B responses are chosen so that the step
*without* speculation takes the published seconds, part by part, and so that generation is the published share of it for
235B. The constants of `Efficiency` are chosen once, for all rows together, and none for a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from specrl.models.shapes import KNOWN_SHAPES
from specrl.projection.refit import Layout
from specrl.projection.simulator.hardware import HARDWARE
from specrl.projection.simulator.step import Speculation, StepModel, speedups
from specrl.projection.simulator.workload import Lengths, Workload

LOGPROB_PASSES = 2
"""The forward passes beside the update, for the log-probs of the policy and of the reference."""


@dataclass(frozen=True)
class PublishedRow:
    """One published figure beside the simulated one."""

    setting: str
    quantity: str
    published: float
    simulated: float

    @property
    def error(self) -> float:
        """The relative error of the simulated figure."""
        return self.simulated / self.published - 1


def qwen3_8b(lengths: Lengths) -> StepModel:
    """Return the measured run of Qwen3-8B on 32 GB200 in BF16, with an engine on each GPU."""
    return StepModel(
        shape=KNOWN_SHAPES["Qwen/Qwen3-8B"],
        hardware=HARDWARE["GB200"],
        gpus=32,
        engine_gpus=1,
        workload=Workload(prompts=512, samples=16, lengths=lengths),
        logprob_passes=LOGPROB_PASSES,
    )


def qwen3_235b(gpus: int) -> StepModel:
    """Return the projected run of Qwen3-235B-A22B in FP8, with an engine on 64 GPUs of an NVLink domain."""
    return StepModel(
        shape=KNOWN_SHAPES["Qwen/Qwen3-235B-A22B"],
        hardware=HARDWARE["GB200"],
        gpus=gpus,
        engine_gpus=64,
        workload=Workload(prompts=256, samples=16, lengths=Lengths(3000, 0.8, 32768)),
        is_fp8=True,
        logprob_passes=LOGPROB_PASSES,
        layout=Layout(tensor_parallel=4, pipeline_parallel=2, expert_parallel=32),
    )


ZERO, THINK = Lengths(1950, 0.8, 8192), Lengths(1750, 0.9, 12288)
PLAIN_SECONDS = {
    "Qwen3-8B, RL-Zero": (partial(qwen3_8b, ZERO), {"generation": 100.0, "log-prob": 17.8, "train": 31.3}),
    "Qwen3-8B, RL-Think": (partial(qwen3_8b, THINK), {"generation": 133.6, "log-prob": 17.9, "train": 31.4}),
}
"""The runs whose seconds without speculation were published."""
GENERATION_SHARE = 0.65
"""The share of generation in the projected steps of 235B on 512 GPUs, which all their published speedups agree on."""


@dataclass(frozen=True)
class _Setting:
    """One setting with its published speedups of generation and of the whole step."""

    name: str
    model: Callable[[], StepModel]
    speculation: Speculation
    generation: float
    step: float
    lag: int = 0


SETTINGS = (
    _Setting("Qwen3-8B, 32 GB200, RL-Zero, k=3, length 3.32", partial(qwen3_8b, ZERO), Speculation(3, 3.32), 1.8, 1.41),
    _Setting(
        "Qwen3-8B, 32 GB200, RL-Think, k=3, length 2.77", partial(qwen3_8b, THINK), Speculation(3, 2.77), 1.54, 1.35
    ),
    _Setting("Qwen3-235B-A22B, 512 GB200, k=3, length 3", partial(qwen3_235b, 512), Speculation(3, 3.0), 2.72, 1.70),
    _Setting("Qwen3-235B-A22B, 512 GB200, k=7, length 5", partial(qwen3_235b, 512), Speculation(7, 5.0), 4.07, 1.96),
    _Setting(
        "Qwen3-235B-A22B, 512 GB200, k=7, length 8 (the most)",
        partial(qwen3_235b, 512),
        Speculation(7, 8.0),
        6.49,
        2.22,
    ),
    _Setting(
        "Qwen3-235B-A22B, 2048 GB200, lag 2, k=5, length 4",
        partial(qwen3_235b, 2048),
        Speculation(5, 4.0),
        3.5,
        2.5,
        lag=2,
    ),
)


def published_rows() -> list[PublishedRow]:
    """Return the published speedups beside the simulated ones."""
    rows = []
    for setting in SETTINGS:
        ((generation, step),) = speedups(setting.model(), [setting.speculation], setting.lag)
        rows.append(PublishedRow(setting.name, "generation speedup", setting.generation, generation))
        rows.append(PublishedRow(setting.name, "step speedup", setting.step, step))
    return rows


def plain_rows() -> list[PublishedRow]:
    """Return the published figures without speculation, by which lengths were chosen, beside the simulated ones."""
    rows = []
    for name, (model, seconds) in PLAIN_SECONDS.items():
        time = model().synchronous(Speculation())
        simulated = {"generation": time.generation, "log-prob": time.logprob, "train": time.update}
        rows += [PublishedRow(name, f"{part}, s", seconds[part], simulated[part]) for part in seconds]
    time = qwen3_235b(512).synchronous(Speculation())
    share = PublishedRow("Qwen3-235B-A22B, 512", "share of generation", GENERATION_SHARE, time.generation / time.total)
    return [*rows, share]
