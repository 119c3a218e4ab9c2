"""The step of an 8B policy on GPUs, from what the decoding of a small one was counted to take per response token.

The simulated step without drafts is scaled: the engine that needs most takes as many iterations fewer as were counted,
and each of them verifies as many positions and makes as many passes of the drafter. An iteration is taken at the mean
number of running requests, so that what drafting costs while many run and gains while few do is averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from specrl.models.shapes import KNOWN_SHAPES
from specrl.projection.simulator.engine import EngineModel
from specrl.projection.simulator.hardware import HARDWARE
from specrl.projection.simulator.step import STEPS, Speculation, StepModel, StepTime
from specrl.projection.simulator.workload import Lengths, Workload

GPUS = (8, 32, 128)
RESPONSES = Workload(128, 16, Lengths(1950, 0.8, 8192))  # lengths as in `published.py`, RL-Zero
TTT_STEPS = 3  # positions that the drafter's update unrolls, each a forward and a backward pass


@dataclass(frozen=True)
class DecodingCounts:
    """What decoding took, each per response token."""

    iterations: float  # of the engine that needed most
    requests: float  # of all engines: a request in an iteration counts as one
    drafted: float  # positions that were verified beside those
    passes: float  # of the drafter, of the engine that needed most


def step_seconds(counts: DecodingCounts, plain: DecodingCounts, gpus: int, *, drafter_updates: float) -> float:
    """The seconds of a step with that many updates of the drafter; `plain` counts the same responses without drafts."""
    model, step = _model(gpus), _plain_step(gpus)
    share = _decoding_s(counts, plain, model) / _decoding_s(plain, plain, model)
    return step.total + step.generation * (share - 1) + drafter_updates * _drafter_s(model)


@cache
def _model(gpus: int) -> StepModel:
    return StepModel(EngineModel(KNOWN_SHAPES["Qwen/Qwen3-8B"], HARDWARE["H100"]), gpus, RESPONSES)


@cache
def _plain_step(gpus: int) -> StepTime:
    return _model(gpus).step(Speculation())


@cache
def _lengths(model: StepModel) -> list[list[int]]:
    drawn = model.workload.draw(STEPS, model.seed)
    return [[item.tokens for group in step for item in group] for step in drawn]


def _decoding_s(counts: DecodingCounts, plain: DecodingCounts, model: StepModel) -> float:
    lengths = _lengths(model)
    iterations = fmean(map(max, lengths)) * counts.iterations / plain.iterations
    running = fmean(map(sum, lengths)) / model.gpus * counts.requests / plain.requests / iterations
    passes = counts.passes / counts.iterations
    engine = replace(model.engine, k=counts.drafted / counts.requests, passes=passes)
    return iterations * engine.at(running, fmean(map(fmean, lengths)) / 2)


def _drafter_s(model: StepModel) -> float:
    engine = model.engine
    tokens = fmean(map(sum, _lengths(model)))
    flops = 3 * 2 * engine.drafter_parameters * TTT_STEPS * tokens
    return flops / (model.gpus * engine.hardware.bf16_flops * engine.efficiency.dense_mfu)
