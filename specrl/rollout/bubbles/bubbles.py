"""The time between the end of a rank's own rollouts and the end of the slowest rank's, put to use.

Ranks tell each other through the process group's store: one counter of ranks that are done. Whatever is done meanwhile
ends within one engine iteration or one micro-step of the last rank's word. Nothing of it reaches a rollout: text made
here is only ever a draft, and drafts decide nothing but the time (invariants 1 and 2). A restart finds no stored text.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Protocol

from specrl.config import Config
from specrl.data.prompts import Prompt, PromptSource
from specrl.distributed import Ranks
from specrl.rollout.bubbles.balance import ExpectedLengths
from specrl.rollout.bubbles.coordinator import Rendezvous
from specrl.rollout.bubbles.pregeneration import Pregeneration, Text, by_tokens
from specrl.rollout.drafts.acceptance import DRAFTER, REPLAY, SourceCounts, SpeculationStats
from specrl.rollout.engine import Engine, Generation
from specrl.timeline import PREGENERATION, SPOT_TRAINING, Bubble, Span, joined, tail_seconds

IDLE_KEPT = 4
"""Bubbles of a rank whose mean is expected of its next."""


class Activity(Protocol):
    """A use of idle time."""

    name: str

    def begin(self, step: int) -> None:
        """A new bubble, in the generation of `step`."""
        ...

    def work(self, stop: Callable[[], bool]) -> bool:
        """One piece of work, ended early when `stop()`; False, at once, when there is none left."""
        ...


class Split:
    """How `both` shares idle time out: by accepted tokens gained per second, as measured in the last steps.

    In every bubble pre-generation goes first, for its share of the seconds expected; the drafter has the rest; a
    longer one begins anew. Before anything is expected pre-generation goes on until nothing is left. Its gain is what
    replay got accepted in the step after; the drafter's, how much longer what is accepted of a draft on the guard's
    probe became (always the same prompts and draft length), times its drafts in the step after.
    """

    LEAST = 0.1
    """Of the time for either, so that both keep being measured."""
    MEMORY = 0.5
    """Of what was measured before, in each step."""
    DEBT = 0.8
    """Of the seconds that bubbles before were too short for, kept in each step."""
    PERIOD = 0.2
    """Seconds that are shared out at least: below, a piece of work is mostly its start."""
    SHORTEST = 0.02
    """Seconds; pre-generation that has less to do yields."""

    def __init__(self) -> None:
        self.share = 1 - self.LEAST
        """Of the time, for pre-generation."""
        self._rates: dict[str, float] = {}
        self._past: dict[str, float] = {}
        """Seconds of bubbles before, older ones counting less: what was too short once is made up for."""
        self._probe: float | None = None
        self._gain: float | None = None
        """Of the drafter's accepted tokens per draft, between the last two probes."""

    def due(self, seconds: Mapping[str, float], expected: float | None) -> float:
        """Seconds for which pre-generation may go on now; 0 where it is the drafter's turn.

        Args:
            seconds: of this bubble so far, by use.
            expected: seconds of a whole bubble.
        """
        if expected is None:
            return math.inf
        period = max(expected, self.PERIOD)
        until = period * (1 + sum(seconds.values()) // period)
        done = seconds.get(PREGENERATION, 0.0) + self._past.get(PREGENERATION, 0.0)
        due = self.share * (until + sum(self._past.values())) - done
        return due if due > self.SHORTEST else 0.0

    def spent(self, seconds: Mapping[str, float]) -> None:
        """A bubble of this rank is over."""
        names = {*self._past, *seconds}
        self._past = {name: self.DEBT * (self._past.get(name, 0.0) + seconds.get(name, 0.0)) for name in names}

    def probed(self, acceptance_length: float) -> None:
        """What the guard found of the drafter that the next step drafts with."""
        self._gain = acceptance_length - self._probe if self._probe is not None else None
        self._probe = acceptance_length

    def learn(self, seconds: Mapping[str, float], stats: SpeculationStats) -> None:
        """What a bubble's use, in seconds of all ranks, brought in the step after it, counted over all ranks."""
        self._count(PREGENERATION, stats.by_source.get(REPLAY, SourceCounts()).num_accepted_tokens, seconds)
        if self._gain is not None:
            drafts = stats.by_source.get(DRAFTER, SourceCounts()).num_drafts
            self._count(SPOT_TRAINING, max(0.0, self._gain * drafts), seconds)
        pregeneration, training = (self._rates.get(name) for name in (PREGENERATION, SPOT_TRAINING))
        if pregeneration is None or training is None:
            return
        total = pregeneration + training
        self.share = min(max(pregeneration / total, self.LEAST), 1 - self.LEAST) if total else 0.5

    def _count(self, name: str, tokens: float, seconds: Mapping[str, float]) -> None:
        if spent := seconds.get(name, 0.0):
            rate = tokens / spent
            self._rates[name] = self.MEMORY * self._rates.get(name, rate) + (1 - self.MEMORY) * rate


class Bubbles:
    """What one rank does with its bubbles, by `bubbles.use`; measured, whatever that is."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        engine: Engine,
        source: PromptSource,
        expected: ExpectedLengths,
        training: Activity | None,
    ) -> None:
        """
        Args:
            training: of the drafter, where `bubbles.use` asks for it.
        """
        self._ranks, self._engine = ranks, engine
        self._meeting: Rendezvous | None = None
        self._pregeneration: Pregeneration | None = None
        self._training = training
        self._split = Split()
        self._idle: deque[float] = deque(maxlen=IDLE_KEPT)
        """Seconds of this rank's last bubbles."""
        self._stored: dict[int, list[Text]] = {}
        """Texts for the step that comes, by prompt id."""
        self._spent: dict[str, float] = {}
        """Seconds of the last bubbles by use, all ranks'."""
        self._replays = config.bubbles.pregenerates
        if ranks.world_size == 1 or config.bubbles.use == "none":
            return
        self._meeting = Rendezvous(ranks.store(), ranks)
        if config.bubbles.pregenerates:
            self._pregeneration = Pregeneration(engine, source, expected, config, self._meeting)

    def open(self, prompts: Sequence[Prompt]) -> None:
        """Before the generation of a step: the engine gets the texts stored for this rank's prompts."""
        if self._meeting is not None:
            self._meeting.open()
        if self._replays:
            found = by_tokens(prompts, self._stored)
            self._engine.set_replay(
                {prompt: [text.tokens for text in texts] for prompt, texts in found.items()},
                {prompt: [text.seed for text in texts] for prompt, texts in found.items()},
            )

    def beat(self) -> None:
        """Tell the other ranks, in every iteration of this rank's own share, that it is alive."""
        if self._meeting is not None:
            self._meeting.beat()

    def metrics(self) -> dict[str, float]:
        """Under their names in MLflow."""
        if self._pregeneration is None or self._training is None:
            return {}
        return {"bubble/pregeneration_share": self._split.share}

    def probed(self, acceptance_length: float) -> None:
        """After a refit: what the guard's probe found of the drafter."""
        self._split.probed(acceptance_length)

    def spend(
        self, step: int, started_at: float, generation: Generation, pace: list[tuple[int, int, float]]
    ) -> tuple[Bubble, list[Text]]:
        """From the end of this rank's own share to the end of the last rank's; with the texts generated meanwhile."""
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
            pregenerated_tokens=sum(len(text.tokens) for text in texts),
            drafter_steps=drafter_steps,
            pace=pace,
        )
        return bubble, texts

    def close(self, bubbles: Sequence[Bubble], texts: Sequence[Sequence[Text]], stats: SpeculationStats) -> None:
        """After all ranks' generation: learn what the last bubbles were worth, keep the texts of these."""
        if self._spent:
            self._split.learn(self._spent, stats)
        self._spent = by_use([span for bubble in bubbles for span in bubble.spans])
        own = bubbles[self._ranks.rank]
        self._split.spent(by_use(own.spans))
        self._idle.append(max(bubble.generated_at for bubble in bubbles) - own.generated_at)
        self._stored = {}
        for text in (text for rank in texts for text in rank):
            self._stored.setdefault(text.prompt_id, []).append(text)

    def _use(self, step: int) -> tuple[list[Span], int]:
        """Work until all ranks are done or nothing is left to do; what was done, and updates of the drafter."""
        meeting = self._meeting
        if meeting is None:
            return [], 0
        meeting.arrive()
        left = [activity for activity in (self._pregeneration, self._training) if activity is not None]
        for activity in left:
            activity.begin(step)
        spans: list[Span] = []
        while left and not meeting.over():
            activity, seconds = self._choose(left, spans)
            started = time.time()
            if activity.work(_after(seconds, meeting.over)):
                spans.append(Span(activity.name, started, time.time()))
            else:
                left.remove(activity)
        return joined(spans), sum(span.name == SPOT_TRAINING for span in spans)

    def _choose(self, left: list[Activity], spans: Sequence[Span]) -> tuple[Activity, float]:
        """What is done next, and for how many seconds at most."""
        if len(left) == 1:
            return left[0], math.inf
        due = self._split.due(by_use(spans), fmean(self._idle) if self._idle else None)
        wanted = PREGENERATION if due else SPOT_TRAINING
        return next(activity for activity in left if activity.name == wanted), due or math.inf


def _after(seconds: float, over: Callable[[], bool]) -> Callable[[], bool]:
    """True once `over()` is, or so many seconds have passed."""
    until = time.monotonic() + seconds
    return lambda: over() or time.monotonic() >= until


def by_use(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.ended_at - span.started_at
    return seconds
