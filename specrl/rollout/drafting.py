"""The control of an engine's drafts: their texts and lengths, and what is learned from their outcomes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean, median

from specrl.config import Config
from specrl.rollout.drafts.cost_model import CostModel
from specrl.rollout.drafts.text_store import TextStore
from specrl.rollout.requests import Request
from specrl.rollout.vllm.engine.arguments import generation_params
from specrl.rollout.vllm.engine.lifecycle import Iteration, VllmEngine

MEASURED = 2
"""The number of iterations measured per batch size and draft length when an engine starts."""
CHOSEN_FOR = 32
"""The iterations after which the draft length is chosen anew, unless a quarter of the requests end before."""
SETTLING = 2
"""The iterations that still have the drafts of another length after a change: with asynchronous scheduling they have
begun, or been given their drafts."""
MOST_ROWS = 512
"""The maximum rows of an iteration measured then; larger ones are extrapolated."""


class Drafting:
    """Controls an engine's speculator: its texts, and the draft length for each number of running requests."""

    def __init__(self, engine: VllmEngine, config: Config) -> None:
        self._engine, self._max_batch = engine, config.engine.max_num_seqs
        self._max_length = config.model.max_length
        self._drafter_k, self._replay_k = drafter_k, replay_k = config.speculation.draft_lengths
        self.k = drafter_k or replay_k
        """The longest draft that `set_length` accepts, in tokens."""
        self._text = engine.text_speculator
        self.texts = TextStore(config.speculation.recent_tokens if config.speculation.draft_method.replays else 0)
        """The texts to draft from; changes take effect in the next generation."""
        self.costs = CostModel(self._max_batch, max(drafter_k, replay_k), drafter_k, engine.graph_sizes)
        self._fixed: int | None = self.k
        self._lengths = [0] * (self._max_batch + 1)
        """The draft lengths by the number of running requests."""
        self._is_measured = False
        self._recalls = self._learns = False
        self._last: float | None = None
        """The end of the last iteration, if all requests were decoding."""
        self._drafted: list[int] = []
        self._chosen_at, self._iterations = 0, 0
        """The running requests when a length was last chosen for them, and the iterations since."""
        self._k, self._steady = -1, 0
        """The draft length of the last iteration, and the number of iterations before it with the same length."""

    def set_length(self, k: int | None) -> None:
        """Set the draft length from now on; None leaves the choice to the cost model. See `Engine.set_k`."""
        if k is None and not self._is_measured:
            self._measure()
        self._text.drafter_k = self._drafter_k if k is None else min(k, self._drafter_k)
        self._fixed = max(k, self._replay_k) if k and self._drafter_k else k
        self._schedule()

    def begin(self, requests: Sequence[Request], stop_tokens: Sequence[int], *, recall: bool, learn: bool) -> None:
        """Begin a generation; the other arguments are those of `Engine.generate`."""
        self._recalls, self._learns, self._last, self._k = recall, learn, None, -1
        self.texts.begin(request.prompt_tokens for request in requests if recall)
        self._refresh()
        self._text.drafts.begin(stop_tokens)
        self._text.drafts.expect(self.costs.acceptance.accepted(), recalls=recall)
        self._schedule()

    def follow(self, iteration: Iteration | None) -> None:
        """Learn from the time of the engine's last iteration; None if it has no result yet."""
        now = time.perf_counter()
        if iteration is None or not iteration.all_decoding:
            self._last = None
            return
        k = self._lengths[iteration.batch]
        self._drafted.append(k)
        self._steady = self._steady + 1 if k == self._k else 0
        self._k = k
        if self._steady >= SETTLING:
            if iteration.mean_tokens is not None:
                self.costs.follow(k, iteration.mean_tokens)
            if self._last is not None and self._learns and self._fixed is None:
                self.costs.observe(iteration.batch, k, now - self._last)
        self._last = now
        if self._fixed is None:
            self._choose(iteration.batch)

    def remember(self, response: Sequence[int], prompt_tokens: Sequence[int]) -> None:
        """Remember a response of this generation, finished or stopped."""
        if self._recalls:
            self.texts.remember(response, prompt_tokens)
        if self.texts.has_siblings:
            self._refresh()

    def end(self) -> None:
        """Learn from the drafts of a generation."""
        if self._learns:
            self.costs.acceptance.learn(self._text.drafts.counts(), self._text.drafter_k)
        self.costs.begin()

    def metrics(self) -> dict[str, float]:
        """The mean draft length of the iterations since the last call."""
        lengths, self._drafted = self._drafted, []
        return {"spec/k": fmean(lengths)} if lengths else {}

    def _refresh(self) -> None:
        self._text.drafts.index = self.texts.index(self._text.drafts.device)

    def _measure(self) -> None:
        self._is_measured = True
        for batch, k in self.costs.to_measure():
            if batch == 1 or batch * (k + 1) <= MOST_ROWS:
                self._measure_length(batch, k)

    def _measure_length(self, batch: int, k: int) -> None:
        self._text.drafts.begin(())
        self._engine.draft_up_to([k] * (self._max_batch + 1))
        # Each length has requests of its own: drafts that are always right soon fill a short context.
        for seed in range(batch):
            request = Request([0], seed, max_tokens=self._max_length, temperature=1.0)
            self._engine.add(request.prompt_tokens, generation_params(request, self._max_length, []))
        seconds: list[float] = []
        while len(seconds) < SETTLING + MEASURED and self._engine.num_running == batch:
            started = time.perf_counter()
            self._engine.step()
            if self._engine.last is not None and self._engine.last.all_decoding:
                seconds.append(time.perf_counter() - started)
        self._engine.end()
        if len(seconds) > SETTLING:
            self.costs.measure(batch, k, *self._engine.agreed(median(seconds[SETTLING:])))

    def _choose(self, batch: int) -> None:
        self._iterations += 1
        if 3 * self._chosen_at <= 4 * batch <= 5 * self._chosen_at and self._iterations < CHOSEN_FOR:
            return
        self._chosen_at, self._iterations = batch, 0
        [length] = self._engine.agreed(self.costs.best(batch))
        self._lengths[1 : batch + 1] = [int(length)] * batch
        self._engine.draft_up_to(self._lengths)

    def _schedule(self) -> None:
        self.costs.begin()
        self._chosen_at, self._iterations = 0, 0
        if self._fixed is not None:
            lengths = [self._fixed] * self._max_batch
        else:
            lengths = [self.costs.best(batch) for batch in range(1, self._max_batch + 1)]
            lengths = [int(length) for length in self._engine.agreed(*lengths)]
        self._lengths = [0, *lengths]
        self._engine.draft_up_to(self._lengths)
