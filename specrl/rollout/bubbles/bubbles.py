"""Bubbles: the time from the end of an engine's own rollouts to the end of the slowest engine's is put to use.

Whatever an engine does meanwhile ends within one iteration or micro-step after the last one is done. Nothing of it
reaches a rollout: text made here is only ever a draft (invariants 1 and 2). The ranks of a tensor-parallel engine do
the same at the same time, as the first one decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from specrl.config import Config
from specrl.data.prompts import PromptSource
from specrl.data.rewards.pool import RewardPool
from specrl.distributed import Ranks
from specrl.rollout.bubbles.coordinator import BubbleCoordinator, EngineRank
from specrl.rollout.bubbles.pregeneration import Pregeneration
from specrl.rollout.bubbles.texts import PregeneratedText
from specrl.rollout.engine import Engine
from specrl.timeline import SPOT_TRAINING, Bubble, Span, joined


class Activity(Protocol):
    """A use of idle time."""

    name: str

    def work(self, stop: Callable[[], bool]) -> bool:
        """Work until `stop()` (collective over the engine); return False, at once, when there is nothing to do."""
        ...


class Bubbles:
    """Puts the bubbles of one rank to use as `bubbles.use` says, and measures them in any case.

    With two uses pre-generation goes first: a token of it saves most of an iteration for its request in the next step.
    The drafter is trained once nothing is left to pre-generate.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        engine: Engine,
        source: PromptSource,
        training: Activity | None,
        rewards: RewardPool | None = None,
    ) -> None:
        self._ranks, self._engine, self._training = ranks, engine, training
        self._coordinator: BubbleCoordinator | None = None
        self._pregeneration: Pregeneration | None = None
        place = EngineRank.of(ranks, config.engine.tensor_parallel)
        if place.num_engines == 1 or config.bubbles.use == "none":
            return
        self._coordinator = BubbleCoordinator(ranks.store(), place)
        if config.bubbles.pregenerates:
            self._pregeneration = Pregeneration(engine, source, config, self._coordinator, rewards)

    def open(self) -> None:
        """Begin the generation of a step."""
        if self._coordinator is not None:
            self._coordinator.open()

    def spend(self, step: int, started_at: float) -> tuple[Bubble, list[PregeneratedText]]:
        """Work from the end of this rank's own share to the end of the last rank's.

        Args:
            started_at: The Unix time at which this rank began its own share.
        """
        generated_at = time.time()
        spans = self._use(step) if self._coordinator is not None else []
        texts = self._pregeneration.texts if self._pregeneration is not None else []
        bubble = Bubble(
            rank=self._ranks.rank,
            started_at=started_at,
            generated_at=generated_at,
            spans=joined(spans),
            pregenerated_tokens=sum(len(text.tokens) for text in texts) if self._engine.is_first else 0,
            drafter_steps=sum(span.name == SPOT_TRAINING for span in spans),
        )
        return bubble, texts

    def _use(self, step: int) -> list[Span]:
        assert self._coordinator is not None
        engine, all_done = self._engine, self._coordinator.all_done
        self._coordinator.arrive()
        left: list[Activity] = [self._training] if self._training is not None else []
        if self._pregeneration is not None:
            self._pregeneration.begin(step)
            left.insert(0, self._pregeneration)
        spans: list[Span] = []
        while left and not engine.agreed(all_done())[0]:
            started = time.time()
            worked = left[0].work(all_done)
            if worked:
                spans.append(Span(left[0].name, started, time.time()))
            if not engine.true_on_any_rank(worked):
                left.pop(0)
        return spans
