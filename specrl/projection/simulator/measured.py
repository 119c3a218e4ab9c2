"""The step of an 8B policy on GPUs, from what drafts were counted to bring a small one.

Engines decode responses of drawn lengths, which begin together and end one after the other, so that an iteration costs
what the number of running responses and their tokens so far make it cost. A drawn response gets as many tokens per
iteration as the counted one whose length has the same rank in its epoch: the tail is drafted as well or as badly as the
longest responses were.

An engine that has drafts of several lengths takes the one that brings the most tokens per second to the responses that
run. This is what `speculation.adaptive` does, with measured seconds, and with what the running requests got in their
last iterations; here it is known what each length brings them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from specrl.config.rollout import BubbleUse
from specrl.models.shapes import KNOWN_SHAPES
from specrl.projection.simulator.engine import EngineModel
from specrl.projection.simulator.generation import DecodingSpeed, Shares, SimulatedResponse
from specrl.projection.simulator.hardware import HARDWARE
from specrl.projection.simulator.step import StepModel
from specrl.projection.simulator.workload import Lengths, Workload, dealt

GPUS = (8, 32, 128)
RESPONSES = Workload(128, 16, Lengths(1950, 0.8, 8192))  # lengths as in `published.py`, RL-Zero
COPY, LEARNED = 4, 32768  # GPUs that hold a copy of the policy, and the tokens that the drafter learns from on them


@dataclass(frozen=True)
class DraftCounts:
    """What drafts of one length were counted to bring; the defaults are plain decoding."""

    k: float = 0.0  # positions that are verified for each request beside the sampled one, padding included
    passes: float = 0.0  # of the drafter in an iteration
    pace: float = 1.0  # tokens per request and iteration
    paces: tuple[float, ...] = (1.0,)  # the same of each response, the shortest response first
    whole_vocabulary: bool = False  # whether the drafter has the policy's head, as an MTP layer does, and not EAGLE-3's

    @property
    def undrafted(self) -> DraftCounts:
        """The same engine where it drafts nothing: a drafter makes a pass all the same, so that it can draft later."""
        return DraftCounts(passes=min(self.passes, 1.0), whole_vocabulary=self.whole_vocabulary)


@cache
def step_seconds(
    lengths: tuple[DraftCounts, ...], gpus: int, drafter_updates: float = 0.0, carried: float = 0.0
) -> float:
    """The seconds of a step with that many updates of the drafter, whose engines choose between these draft lengths.

    Args:
        carried: For how many tokens responses agree with text that idle engines generate ahead; 0 where they do not.
    """
    model = _model(gpus)
    engine, drafted = model.engine, [_drafted(dealt(groups, gpus, 0, 1.0), lengths) for groups in model.drawn]
    if lengths[0].whole_vocabulary:
        engine = replace(engine, draft_vocab_size=engine.shape.vocab_size)
    choices = tuple(replace(engine, k=one.k, passes=one.passes).at for one in lengths)
    speed = DecodingSpeed(choices, engine.row_s, carried)
    use: BubbleUse = "pregenerate" if carried else "none"
    return model.time(drafted, speed, use, drafter_s=drafter_updates * model.drafter_s(engine)).total


@cache
def _model(gpus: int) -> StepModel:
    engine, learned = EngineModel(KNOWN_SHAPES["Qwen/Qwen3-8B"], HARDWARE["H100"]), gpus / COPY * LEARNED
    return StepModel(engine, gpus, RESPONSES, drafter_tokens=learned)


def _drafted(shares: Shares, lengths: Sequence[DraftCounts]) -> Shares:
    by_length = sorted(chain(*shares), key=lambda response: response.length)
    places = {(response.prompt, response.sample): place for place, response in enumerate(by_length)}

    def drafted(response: SimulatedResponse) -> SimulatedResponse:
        place = places[response.prompt, response.sample]
        return replace(response, paces=tuple(one.paces[place * len(one.paces) // len(places)] for one in lengths))

    return [[drafted(response) for response in share] for share in shares]
