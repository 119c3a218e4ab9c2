"""Bubbles: the time from the end of an engine's own rollouts to the end of the slowest engine's is put to use.

Whatever an engine does meanwhile ends within one iteration or micro-step after the last one is done. Nothing of it
reaches a rollout: text made here is only ever a draft (invariants 1 and 2). The ranks of a tensor-parallel engine do
the same at the same time, as the first one decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from specrl.config import Config
from specrl.data.prompts import PromptSource
from specrl.distributed import Ranks
from specrl.rollout.bubbles.balance import ResponseLengthEstimator
from specrl.rollout.bubbles.coordinator import BubbleCoordinator, EngineRank
from specrl.rollout.bubbles.pregeneration import Pregeneration
from specrl.rollout.bubbles.share import MEMORY, BubbleShare
from specrl.rollout.bubbles.texts import PregeneratedText
from specrl.rollout.drafts.acceptance import SpeculationStats
from specrl.rollout.engine import Engine, Generation
from specrl.timeline import PREGENERATION, SPOT_TRAINING, Bubble, Span, joined, tail_seconds


class Activity(Protocol):
    """A use of idle time."""

    name: str

    def begin(self, step: int) -> None:
        """Begin a new bubble, in the generation of `step`."""
        ...

    def work(self, stop: Callable[[], bool]) -> bool:
        """Work until `stop()` (collective over the engine); return False, at once, when there is nothing to do."""
        ...


class Bubbles:
    """Puts the bubbles of one rank to use as `bubbles.use` says, and measures them in any case."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        engine: Engine,
        source: PromptSource,
        expected: ResponseLengthEstimator,
        training: Activity | None,
    ) -> None:
        """Prepare what `bubbles.use` asks for; pre-generation begins with the longest that is `expected`."""
        self._ranks, self._engine = ranks, engine
        self._coordinator: BubbleCoordinator | None = None
        self._pregeneration: Pregeneration | None = None
        self._training = training
        self._share = BubbleShare()
        self._expected: float | None = None  # the seconds of this rank's next bubble
        self._spent: dict[str, float] = {}  # those of each use in the last bubbles of all ranks
        place = EngineRank.of(ranks, config.engine.tensor_parallel)
        if place.num_engines == 1 or config.bubbles.use == "none":
            return
        self._coordinator = BubbleCoordinator(ranks.store(), place)
        if config.bubbles.pregenerates:
            self._pregeneration = Pregeneration(engine, source, expected, config, self._coordinator)

    def open(self) -> None:
        """Begin the generation of a step."""
        if self._coordinator is not None:
            self._coordinator.open()

    def beat(self) -> None:
        """Tell the other engines that this one is alive; called in every iteration of its own share."""
        if self._coordinator is not None:
            self._coordinator.beat()

    def metrics(self) -> dict[str, float]:
        """The metrics of sharing idle time by their names in MLflow; empty unless two uses share it."""
        if self._pregeneration is None or self._training is None:
            return {}
        return {"bubble/pregeneration_share": self._share.pregeneration}

    def probed(self, acceptance_length: float) -> None:
        """Take in the acceptance length on the guard's probe."""
        self._share.probed(acceptance_length)

    def spend(
        self,
        step: int,
        started_at: float,
        generation: Generation,
        pace: list[tuple[int, int, float]],
        saved_s: float | None = None,
    ) -> tuple[Bubble, list[PregeneratedText]]:
        """Work from the end of this rank's own share to the end of the last rank's.

        Args:
            started_at: The Unix time at which this rank began its own share, which `generation` is.
            pace: The pace of that generation, `Pace.rows`.
            saved_s: The seconds that drafts saved in it, `Bubble.saved_s`.
        """
        generated_at = time.time()
        spans, drafter_steps = self._use(step)
        texts = self._pregeneration.texts if self._pregeneration is not None and spans else []
        bubble = Bubble(
            rank=self._ranks.rank,
            started_at=started_at,
            generated_at=generated_at,
            resumed_at=time.time(),
            num_tokens=generation.num_tokens,
            tail_s=tail_seconds([response.finished_at for response in generation.responses]),
            spans=spans,
            pregenerated_tokens=sum(len(text.tokens) for text in texts) if self._engine.is_first else 0,
            drafter_steps=drafter_steps,
            pace=pace,
            saved_s=saved_s,
        )
        return bubble, texts

    def close(self, bubbles: Sequence[Bubble], stats: SpeculationStats) -> None:
        """Learn what the previous bubbles brought, and how long these, of all ranks in order, were."""
        if self._spent:
            self._share.learn(self._spent, stats)
        self._spent = by_use([span for bubble in bubbles for span in bubble.spans])
        own = bubbles[self._ranks.rank]
        self._share.spent(by_use(own.spans))
        idle = max(bubble.generated_at for bubble in bubbles) - own.generated_at
        before = self._expected if self._expected is not None else idle
        self._expected = MEMORY * before + (1 - MEMORY) * idle

    def _use(self, step: int) -> tuple[list[Span], int]:
        coordinator = self._coordinator
        if coordinator is None:
            return [], 0
        coordinator.arrive()
        left = [activity for activity in (self._pregeneration, self._training) if activity is not None]
        for activity in left:
            activity.begin(step)
        spans: list[Span] = []
        of_engine: list[Span] = []  # what any of the engine's ranks worked on, while the others waited
        while left and (chosen := self._choose(left, of_engine)) is not None:
            activity, seconds = chosen
            started = time.time()
            worked = activity.work(_after(seconds, coordinator.over))
            if worked:
                spans.append(Span(activity.name, started, time.time()))
            if self._engine.true_on_any_rank(worked):
                of_engine.append(Span(activity.name, started, time.time()))
            else:
                left.remove(activity)
        return joined(spans), sum(span.name == SPOT_TRAINING for span in spans)

    def _choose(self, left: list[Activity], spans: Sequence[Span]) -> tuple[Activity, float] | None:
        # What to do next and for how many seconds at most; None once all engines are done (collective over the engine).
        assert self._coordinator is not None
        own = (-1, math.inf) if self._coordinator.over() else self._own_choice(left, spans)
        index, seconds = self._engine.agreed(*own)
        return None if index < 0 else (left[int(index)], seconds)

    def _own_choice(self, left: list[Activity], spans: Sequence[Span]) -> tuple[int, float]:
        if len(left) == 1:
            return 0, math.inf
        due = self._share.due(by_use(spans), self._expected)
        wanted = PREGENERATION if due else SPOT_TRAINING
        return [activity.name for activity in left].index(wanted), due or math.inf


def _after(seconds: float, over: Callable[[], bool]) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: over() or time.monotonic() >= until


def by_use(spans: Sequence[Span]) -> dict[str, float]:
    """The total seconds of the spans of each name."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.ended_at - span.started_at
    return seconds
