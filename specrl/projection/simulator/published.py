"""Published figures and the simulator's for the same settings.

Iso et al. 2026, "Accelerating RL Post-Training Rollouts via System-Integrated Speculative Decoding" (arXiv:2604.26779):
measured steps of Qwen3-8B on 32 GB200, and projections of Qwen3-235B-A22B in FP8 with 4,096 responses a step.

The paper gives neither response lengths nor layouts. Lengths and the number of 8B responses were chosen so that the
parts of a step *without* speculation take the published seconds, and so that generation has its published share at
235B; the constants of `Efficiency` were fitted jointly to the speedups at k = 3 and at 235B. These rows are
`chosen_on`; all others are predictions. Left out is what cannot be simulated: n-gram drafts, whose number is unknown,
and steps in which some GPUs generate for a later step while others train.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from specrl.config import PolicyConfig
from specrl.models.shapes import KNOWN_SHAPES
from specrl.projection.simulator.engine import HARDWARE, EngineModel
from specrl.projection.simulator.step import Lengths, Speculation, StepModel, Workload


@dataclass(frozen=True)
class PublishedRow:
    setting: str
    quantity: str
    published: float
    predicted: float
    chosen_on: bool  # whether constants were fitted to it, so that agreement proves nothing
    k: int

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


ZERO, THINK, LARGE = "Qwen3-8B, RL-Zero", "Qwen3-8B, RL-Think", "Qwen3-235B-A22B, 512 GB200"
OF_8B = EngineModel(KNOWN_SHAPES["Qwen/Qwen3-8B"], HARDWARE["GB200"])
OF_235B = EngineModel(KNOWN_SHAPES["Qwen/Qwen3-235B-A22B"], HARDWARE["GB200"], gpus=64, is_fp8=True)
SHARDS = PolicyConfig(tensor_parallel=4, pipeline_parallel=2, expert_parallel=32)
MODELS = {
    ZERO: StepModel(OF_8B, 32, Workload(512, 16, Lengths(1950, 0.8, 8192), whole_groups=True), logprob_passes=2),
    THINK: StepModel(OF_8B, 32, Workload(512, 16, Lengths(1750, 0.9, 12288), whole_groups=True), logprob_passes=2),
    LARGE: StepModel(
        OF_235B, 512, Workload(256, 16, Lengths(3000, 0.8, 32768), whole_groups=True), logprob_passes=2, policy=SHARDS
    ),
}
"""Besides the update, policy and reference compute log-probs."""
PLAIN = {
    ZERO: {"generation, s": 100.0, "logprob, s": 17.8, "update, s": 31.3},
    THINK: {"generation, s": 133.6, "logprob, s": 17.9, "update, s": 31.4},
    LARGE: {"share of generation": 0.65},
}
"""Published figures without speculation; all published speedups at 235B imply the same share of generation."""
SPEEDUPS = (
    (ZERO, "k=3", 3, 3.32, 1.8, 1.41),
    (THINK, "k=3", 3, 2.77, 1.54, 1.35),
    (LARGE, "k=3", 3, 3.0, 2.72, 1.70),
    (LARGE, "k=7", 7, 5.0, 4.07, 1.96),
    (LARGE, "k=7", 7, 8.0, 6.49, 2.22),
    (ZERO, "k=5", 5, 4.35, 1.44, None),
    (THINK, "k=5", 5, 3.23, 0.84, None),
    (ZERO, "k=7", 7, 5.06, 1.21, None),
    (THINK, "k=7", 7, 3.48, 0.71, None),
    (ZERO, "k=3, task drafter, online", 3, 3.29, 1.78, None),
    (THINK, "k=3, task drafter, online", 3, 2.74, 1.52, None),
    (ZERO, "k=3, chat drafter", 3, 2.88, 1.51, None),
    (THINK, "k=3, chat drafter", 3, 2.40, 1.19, None),
    (ZERO, "k=3, chat drafter, online", 3, 3.04, 1.63, None),
    (THINK, "k=3, chat drafter, online", 3, 2.55, 1.26, None),
)
"""Drafts, k, acceptance length, and the speedups of generation and step; constants were fitted to rows with both. At
8B, k = 3 uses a drafter trained on the task's own data unless stated otherwise."""


def published_rows() -> list[PublishedRow]:
    """Simulate every published setting; those to which constants were fitted come first."""
    rows, plain = [], {name: model.step(Speculation()) for name, model in MODELS.items()}
    for name, figures in PLAIN.items():
        found = {f"{part}, s": getattr(plain[name], part) for part in ("generation", "logprob", "update")}
        found["share of generation"] = plain[name].generation / plain[name].total
        for quantity, figure in figures.items():
            rows.append(PublishedRow(f"{name}, no speculation", quantity, figure, found[quantity], True, 0))
    for name, drafts, k, length, generation, step in SPEEDUPS:
        setting, chosen_on = f"{name}, {drafts}, length {length:g}", step is not None
        time = MODELS[name].step(Speculation(k, length))
        speedup = plain[name].generation / time.generation
        rows.append(PublishedRow(setting, "generation speedup", generation, speedup, chosen_on, k))
        if step is not None:
            speedup = plain[name].total / time.total
            rows.append(PublishedRow(setting, "step speedup", step, speedup, chosen_on, k))
    return rows


def mean_error(rows: Sequence[PublishedRow], k: tuple[int, ...] = (3, 5, 7)) -> float:
    return fmean(abs(row.ratio - 1) for row in rows if not row.chosen_on and row.k in k)
