"""Published figures beside those that the simulator finds for the same settings.

Iso et al. 2026, "Accelerating RL Post-Training Rollouts via System-Integrated Speculative Decoding" (arXiv:2604.26779):
measured steps of Qwen3-8B on 32 GB200, and projections of Qwen3-235B-A22B in FP8 with 4,096 responses a step.

The paper gives neither response lengths nor layouts. Lengths and the number of 8B responses were chosen so that the
step *without* speculation takes the published seconds, part by part, and so that generation is the published share of
it for 235B; the constants of `Efficiency` were chosen for the speedups at k = 3 and at 235B together. Those rows are
`chosen_on`. All others are predictions: nothing was chosen on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from specrl.config import PolicyConfig
from specrl.models.shapes import KNOWN_SHAPES
from specrl.projection.simulator.engine import EngineModel
from specrl.projection.simulator.hardware import HARDWARE
from specrl.projection.simulator.step import Speculation, StepModel, StepTime
from specrl.projection.simulator.workload import Lengths, Workload

LOGPROB_PASSES = 2  # beside the update: of the policy and of the reference


@dataclass(frozen=True)
class PublishedRow:
    setting: str
    quantity: str
    published: float
    predicted: float | None  # None where too little of the setting is known to simulate it
    chosen_on: bool  # whether constants of the simulator were, so that agreement with it proves nothing
    k: int | None  # None where it is not known

    @property
    def ratio(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.published

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def qwen3_8b(lengths: Lengths) -> StepModel:
    engine = EngineModel(KNOWN_SHAPES["Qwen/Qwen3-8B"], HARDWARE["GB200"])
    return StepModel(engine, 32, Workload(512, 16, lengths), logprob_passes=LOGPROB_PASSES)


def qwen3_235b() -> StepModel:
    engine = EngineModel(KNOWN_SHAPES["Qwen/Qwen3-235B-A22B"], HARDWARE["GB200"], gpus=64, is_fp8=True)
    workload = Workload(256, 16, Lengths(3000, 0.8, 32768))
    policy = PolicyConfig(tensor_parallel=4, pipeline_parallel=2, expert_parallel=32)
    return StepModel(engine, 512, workload, logprob_passes=LOGPROB_PASSES, policy=policy)


ZERO, THINK = qwen3_8b(Lengths(1950, 0.8, 8192)), qwen3_8b(Lengths(1750, 0.9, 12288))
PLAIN = (
    ("RL-Zero", ZERO, {"generation": 100.0, "logprob": 17.8, "update": 31.3}),
    ("RL-Think", THINK, {"generation": 133.6, "logprob": 17.9, "update": 31.4}),
)
"""Published seconds of the parts of a step of Qwen3-8B without speculation."""
GENERATION_SHARE = 0.65
"""The share of generation in the projected steps of 235B on 512 GPUs, which all their published speedups agree on."""
IN_DOMAIN = (("RL-Zero", ZERO, 3.32, 1.8, 1.41), ("RL-Think", THINK, 2.77, 1.54, 1.35))
"""Acceptance length at k = 3 of Qwen3-8B with a drafter of the task's own data, and the speedups of generation and of
the step."""
OTHER_DRAFTERS = (
    ("k=5", 5, (4.35, 1.44), (3.23, 0.84)),
    ("k=7", 7, (5.06, 1.21), (3.48, 0.71)),
    ("k=3, task drafter, online", 3, (3.29, 1.78), (2.74, 1.52)),
    ("k=3, chat drafter", 3, (2.88, 1.51), (2.40, 1.19)),
    ("k=3, chat drafter, online", 3, (3.04, 1.63), (2.55, 1.26)),
    ("n-gram (k not known)", None, (2.47, 0.7), (2.05, 0.5)),
)
"""The same figures of other drafters and k, RL-Zero before RL-Think; of these only generation is known."""
LARGE = ((3, 3.0, 2.72, 1.70), (7, 5.0, 4.07, 1.96), (7, 8.0, 6.49, 2.22))
"""k, acceptance length and the speedups of generation and step of Qwen3-235B-A22B on 512 GPUs."""


def published_rows() -> list[PublishedRow]:
    """Simulate every published setting; those on which constants were chosen come first."""
    return sorted([*_small(), *_large()], key=lambda row: not row.chosen_on)


def mean_error(rows: Sequence[PublishedRow], k: tuple[int, ...] = (3, 5, 7)) -> float:
    return fmean(abs(row.ratio - 1) for row in rows if row.ratio is not None and not row.chosen_on and row.k in k)


def _small() -> Iterator[PublishedRow]:
    plain = {}
    for name, model, seconds in PLAIN:
        plain[name] = model.step(Speculation())
        for part, published in seconds.items():
            found = getattr(plain[name], part)
            yield PublishedRow(f"Qwen3-8B, {name}, no speculation", f"{part}, s", published, found, True, 0)
    for name, model, length, generation, step in IN_DOMAIN:
        time = model.step(Speculation(3, length))
        setting = f"Qwen3-8B, {name}, k=3, length {length}"
        yield from _speedups(setting, plain[name], time, (generation, step), 3)
    for drafter, k, *figures in OTHER_DRAFTERS:
        for (name, model, *_), (length, published) in zip(IN_DOMAIN, figures, strict=True):
            found = model.generation(Speculation(k, length))[0] if k else None
            speedup = plain[name].generation / found if found else None
            setting = f"Qwen3-8B, {name}, {drafter}, length {length}"
            yield PublishedRow(setting, "generation speedup", published, speedup, False, k)
    # Steps with a lag, in which some GPUs generate for a later step while others train, are not simulated.
    yield PublishedRow("Qwen3-8B, lag 1, k=3", "step speedup", round(75.0 / 60.5, 2), None, False, 3)


def _large() -> Iterator[PublishedRow]:
    model = qwen3_235b()
    plain = model.step(Speculation())
    setting = "Qwen3-235B-A22B, 512 GB200"
    share = plain.generation / plain.total
    yield PublishedRow(f"{setting}, no speculation", "share of generation", GENERATION_SHARE, share, True, 0)
    for k, length, *figures in LARGE:
        time = model.step(Speculation(k, length))
        yield from _speedups(f"{setting}, k={k}, length {length:g}", plain, time, figures, k)
    for quantity, figure in (("generation", 3.5), ("step", 2.5)):
        setting = "Qwen3-235B-A22B, 2048 GB200, lag 2, k=5, length 4"
        yield PublishedRow(setting, f"{quantity} speedup", figure, None, False, 5)


def _speedups(
    setting: str, plain: StepTime, time: StepTime, published: Sequence[float], k: int
) -> Iterator[PublishedRow]:
    found = (plain.generation / time.generation, plain.total / time.total)
    for quantity, figure, predicted in zip(("generation", "step"), published, found, strict=True):
        yield PublishedRow(setting, f"{quantity} speedup", figure, predicted, True, k)
