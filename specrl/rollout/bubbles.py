"""The time between the end of a rank's own rollouts and the end of the slowest rank's, put to use.

Ranks tell each other through the process group's store: one counter of ranks that are done. Whatever is done meanwhile
ends within one engine iteration or one micro-step of the last rank's word. Nothing of it reaches a rollout: text made
here is only ever a draft, and drafts decide nothing but the time (invariants 1 and 2). A restart finds no stored text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch.distributed.distributed_c10d import PrefixStore, Store

from specrl.config import Config
from specrl.data.prompts import Prompt, PromptSource
from specrl.distributed import Ranks
from specrl.rollout.acceptance import DRAFTER, REPLAY, SourceCounts, SpeculationStats
from specrl.rollout.balance import ExpectedLengths
from specrl.rollout.collect import Origin, make_request
from specrl.rollout.engine import Engine, Generation, Request
from specrl.timeline import PREGENERATION, SPOT_TRAINING, Bubble, Span, joined, tail_seconds

POLL_SECONDS = 0.02
Texts = list[tuple[int, list[int]]]
"""(prompt id, response tokens) of pre-generated responses, unfinished ones included."""


class Activity(Protocol):
    """A use of idle time."""

    name: str

    def begin(self, step: int) -> None:
        """A new bubble, in the generation of `step`."""
        ...

    def work(self, stop: Callable[[], bool]) -> bool:
        """One piece of work, ended early when `stop()`; False, at once, when there is none left."""
        ...


class Rendezvous:
    """Counters of one generation after another, in the store that all ranks see.

    All ranks pass through a collective between two generations: then nobody reads the counters of the one before.
    """

    def __init__(self, store: Store, ranks: Ranks, poll_seconds: float = POLL_SECONDS) -> None:
        self._store = PrefixStore("specrl/bubbles", store)
        self._ranks = ranks
        self._poll_seconds = poll_seconds
        self._round = 0
        self._all_done = False
        self._asked_at = 0.0

    def open(self) -> None:
        """A new generation begins."""
        if self._round and self._ranks.is_first:
            self._store.delete_key(f"done/{self._round}")
            self._store.delete_key(f"claimed/{self._round}")
        self._round += 1
        self._all_done, self._asked_at = False, 0.0

    def arrive(self) -> None:
        """This rank's own share is done."""
        self._all_done = self._store.add(f"done/{self._round}", 1) == self._ranks.world_size

    def all_done(self) -> bool:
        """Whether every rank's share is done; asks the store at most every `poll_seconds`."""
        now = time.monotonic()
        if not self._all_done and now - self._asked_at >= self._poll_seconds:
            self._asked_at = now
            self._all_done = self._store.add(f"done/{self._round}", 0) == self._ranks.world_size
        return self._all_done

    def claim(self, total: int, at_least: int = 1) -> range:
        """The next items of a list of `total` that is the same on every rank; no item is given twice.

        Half of what is left, shared out over the ranks: large pieces first, and a small one to the last.
        """
        left = total - self._store.add(f"claimed/{self._round}", 0)
        if left <= 0:
            return range(0)
        size = max(at_least, -(-left // (2 * self._ranks.world_size)))
        start = self._store.add(f"claimed/{self._round}", size) - size
        return range(min(start, total), min(start + size, total))


class Pregeneration:
    """Responses to the next step's prompts under the current policy, longest expected first."""

    name = PREGENERATION

    def __init__(
        self, engine: Engine, source: PromptSource, expected: ExpectedLengths, config: Config, meeting: Rendezvous
    ) -> None:
        self._engine, self._source, self._expected = engine, source, expected
        self._config, self._meeting = config, meeting
        self._step = 0
        self._wanted: list[tuple[Prompt, int]] | None = None
        self.texts: Texts = []
        """Of this bubble."""

    def begin(self, step: int) -> None:
        self._step, self._wanted, self.texts = step + 1, None, []

    def work(self, stop: Callable[[], bool]) -> bool:
        if self._wanted is None:
            self._wanted = self._list()
        claimed = self._meeting.claim(len(self._wanted), self._config.train.samples_per_prompt)
        if not claimed:
            return False
        wanted = self._wanted[claimed.start : claimed.stop]
        generation = self._engine.generate([self._request(prompt, sample) for prompt, sample in wanted], stop=stop)
        for (prompt, _), response in zip(wanted, generation.responses, strict=True):
            if response.tokens:
                self.texts.append((prompt.id, list(response.tokens)))
        return True

    def _list(self) -> list[tuple[Prompt, int]]:
        """Every response of the next step, groups together; none after the last step."""
        if self._step >= self._config.train.num_steps:
            return []
        prompts = sorted(self._source.batch(self._step), key=lambda prompt: -self._expected.of(prompt))
        return [(prompt, sample) for prompt in prompts for sample in range(self._config.train.samples_per_prompt)]

    def _request(self, prompt: Prompt, sample: int) -> Request:
        """The very request of the next step, or one of the same group that the next step does not make."""
        other = self._config.bubbles.seeds == "other"
        index = sample + self._config.train.samples_per_prompt if other else sample
        return make_request(prompt, index, self._config, Origin(self._config.seed, self._step))


class Split:
    """How `both` shares idle time out: by accepted tokens gained per second, as measured in the last steps.

    Pre-generation has the first bubble until nothing is left to generate. Its gain is what replay got accepted in the
    step after; the drafter's, how many more of its tokens per draft were accepted than the step before, times drafts.
    """

    LEAST = 0.1
    """Of the time for either, so that both keep being measured."""
    MEMORY = 0.5

    def __init__(self) -> None:
        self.share = 1.0
        """Of the time, for pre-generation."""
        self._rates: dict[str, float] = {}
        self._accepted_per_draft: float | None = None

    def prefers_pregeneration(self, seconds: Mapping[str, float]) -> bool:
        """Which is behind its share, given the seconds of this bubble so far."""
        done = seconds.get(PREGENERATION, 0.0)
        return done <= self.share * (done + seconds.get(SPOT_TRAINING, 0.0))

    def learn(self, seconds: Mapping[str, float], stats: SpeculationStats) -> None:
        """What a bubble's use, in seconds of all ranks, brought in the step after it, counted over all ranks."""
        replayed = stats.by_source.get(REPLAY, SourceCounts()).num_accepted_tokens
        drafts, _, accepted = stats.by_source.get(DRAFTER, SourceCounts())
        per_draft = accepted / drafts if drafts else self._accepted_per_draft
        gained = drafts * (per_draft - self._accepted_per_draft) if per_draft and self._accepted_per_draft else 0.0
        self._accepted_per_draft = per_draft
        self._count(PREGENERATION, replayed, seconds)
        self._count(SPOT_TRAINING, max(0.0, gained), seconds)
        pregeneration, training = (self._rates.get(name) for name in (PREGENERATION, SPOT_TRAINING))
        if pregeneration is None or training is None:
            self.share = 1 - self.LEAST
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
        self._stored: dict[int, list[list[int]]] = {}
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
            self._engine.set_replay(by_tokens(prompts, self._stored))

    def spend(
        self, step: int, started_at: float, generation: Generation, pace: list[tuple[int, int, float]]
    ) -> tuple[Bubble, Texts]:
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
            pregenerated_tokens=sum(len(tokens) for _, tokens in texts),
            drafter_steps=drafter_steps,
            pace=pace,
        )
        return bubble, texts

    def close(self, bubbles: Sequence[Bubble], texts: Sequence[Texts], stats: SpeculationStats) -> None:
        """After all ranks' generation: learn what the last bubbles were worth, keep the texts of these."""
        if self._spent:
            self._split.learn(self._spent, stats)
        self._spent = {}
        for span in (span for bubble in bubbles for span in bubble.spans):
            self._spent[span.name] = self._spent.get(span.name, 0.0) + span.ended_at - span.started_at
        self._stored = {}
        for prompt_id, tokens in (text for rank in texts for text in rank):
            self._stored.setdefault(prompt_id, []).append(tokens)

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
        while left and not meeting.all_done():
            activity = self._choose(left, spans)
            started = time.time()
            if activity.work(meeting.all_done):
                spans.append(Span(activity.name, started, time.time()))
            else:
                left.remove(activity)
        return joined(spans), sum(span.name == SPOT_TRAINING for span in spans)

    def _choose(self, left: list[Activity], spans: Sequence[Span]) -> Activity:
        if len(left) == 1:
            return left[0]
        seconds: dict[str, float] = {}
        for span in spans:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.ended_at - span.started_at
        wanted = PREGENERATION if self._split.prefers_pregeneration(seconds) else SPOT_TRAINING
        return next(activity for activity in left if activity.name == wanted)


def by_tokens(
    prompts: Sequence[Prompt], stored: Mapping[int, list[list[int]]]
) -> dict[tuple[int, ...], list[list[int]]]:
    """Stored texts of these prompts as the engine wants them; prompts of equal text share theirs."""
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for prompt in prompts:
        if prompt.id in stored:
            found.setdefault(tuple(prompt.tokens), []).extend(stored[prompt.id])
    return found
