"""The draft length for each running batch size: it maximises an iteration's expected tokens over its expected seconds.

The seconds are measured when an engine starts, and updated while it runs. The tokens follow from the counters of
verified and of merely possible drafts. There is no exploration, and nothing is stored.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrl.rollout.drafts.device_drafts import Counts
from specrl.rollout.drafts.text_index import CONTINUED, DRAFTERS, NOTHING, SIZES

Floats = NDArray[np.float64]
LENGTHS = (0, 1, 2, 3, 5, 7, 15)
"""The draft lengths to choose from; full CUDA graphs are captured for these alone."""
NEARLY = 0.8
"""Lengths from this share of the longest one on are not offered beside it."""
SHARED = 0.75
"""How much of a change in one draft length's time is attributed to the machine or the contexts."""
TIME_WINDOW = 8.0
"""The number of iterations after which an observation of an iteration's time has a weight of 1/e."""
RUNNING_WINDOW, OTHERS_WINDOW, PRIOR_RUNNING = 16.0, 512.0, 1.0
"""The number of iterations after which what a draft length brought the running requests weighs 1/e, while it is in use
and while it is not; and the weight of the average over all requests, in accepted tokens of a request."""
TEXT_WINDOW = 500
"""The maximum weight of older observations of a kind, in drafts."""
KEPT_ON_REFIT = 0.1
"""The factor on the weight of observations of accepted tokens at every refit."""
GUESSED_ACCEPTANCE = 0.6
"""The assumed probability that the next token of a drafter's draft is right, before any was seen."""
EVEN_AGREEMENT = 2.0
"""The number of agreeing tokens at which text is guessed to continue correctly half of the time."""
PRIOR_DRAFTS, PRIOR_REQUESTS = 4.0, 25.0
"""The weights of these guesses, in drafts, and of that that every request has a draft of the drafter, in requests x
iterations."""
WORTHWHILE = 0.01
"""The share by which the expected tokens per second must rise for anything to be drafted."""


def possible_lengths(k: int, drafter_k: int) -> tuple[int, ...]:
    """The draft lengths to choose from, including the longest and the drafter's longest.

    A length close to the longest is left out, because every length needs CUDA graphs.
    """
    return tuple(sorted({*(length for length in LENGTHS if length < NEARLY * k), k, drafter_k}))


class Acceptance:
    """How many tokens of a draft are accepted, by kind and position, and how often a request has each kind of draft."""

    def __init__(self, k: int, drafter_k: int) -> None:
        """Begin with guesses for drafts of up to `k` tokens; the drafter's, if any, have up to `drafter_k`."""
        self._drafter_k = drafter_k
        self._seen, self._right = np.zeros((NOTHING, k)), np.zeros((NOTHING, k))
        self._offered = np.zeros(NOTHING + 1)
        agreements = np.array([*SIZES, *SIZES])
        self._guess = np.append(agreements / (agreements + EVEN_AGREEMENT), [GUESSED_ACCEPTANCE, GUESSED_ACCEPTANCE])

    def learn(self, counts: Counts, passes: int | None = None) -> None:
        """Learn from the counters of a generation in which the drafter drafted at most `passes` tokens."""
        own = slice(0, self._drafter_k if passes is None else passes)
        weights = np.minimum(1, TEXT_WINDOW / np.maximum(self._seen[:, :1], 1))
        self._seen = self._seen * weights + _with_drafters(counts.seen[:NOTHING], own)
        self._right = self._right * weights + _with_drafters(counts.right[:NOTHING], own)
        weight = min(1, TEXT_WINDOW / max(self._offered.sum(), 1))
        self._offered = self._offered * weight + counts.offered

    def fade(self) -> None:
        """Reduce the weight of old observations, because policy or drafter has changed."""
        self._seen *= KEPT_ON_REFIT
        self._right *= KEPT_ON_REFIT
        self._offered *= KEPT_ON_REFIT

    def by_position(self) -> Floats:
        """The probability that a draft's token is right given that those before it are, [kinds, k].

        A position seen rarely is assumed to be as likely as the one before it, and the first one as likely as guessed.
        """
        found, before = [], self._guess
        for seen, right in zip(self._seen.T, self._right.T, strict=True):
            before = (PRIOR_DRAFTS * before + right) / (PRIOR_DRAFTS + seen)
            found.append(before)
        return np.stack(found, 1)

    def accepted(self) -> Floats:
        """The expected accepted tokens of a draft by its length, [k + 1, kinds]."""
        chances = self.by_position().cumprod(1)
        chances[DRAFTERS, self._drafter_k :] = 0
        return np.concatenate([np.zeros((1, NOTHING)), chances.cumsum(1).T])

    def tokens(self) -> Floats:
        """The expected tokens of a request in an iteration by draft length, [k + 1]; 1 without a draft.

        Without observations, each request is assumed to have a draft of the drafter, if there is one.
        """
        offered = self._offered.copy()
        offered[DRAFTERS if self._drafter_k else NOTHING] += PRIOR_REQUESTS
        shares = offered / offered.sum()
        tokens: Floats = 1 + self.accepted() @ shares[:NOTHING]
        return tokens


def _with_drafters(counts: NDArray[np.int64], own: slice) -> NDArray[np.int64]:
    # The drafter's own tokens, with text behind them or without.
    counts = counts.copy()
    counts[DRAFTERS, own] = counts[CONTINUED, own] = counts[DRAFTERS, own] + counts[CONTINUED, own]
    return counts


class Seconds:
    """The seconds of an iteration by batch size, for one draft length.

    An iteration between two CUDA graph sizes takes as long as at the larger one.
    """

    def __init__(self, k: int, graph_sizes: Sequence[int]) -> None:
        """Begin with nothing measured. `graph_sizes` are numbers of rows, ascending; a request takes k + 1."""
        self._per_request, self._graphs = k + 1, graph_sizes
        self._logs: dict[int, float] = {}  # of the seconds measured, by rows

    def computed(self, batch: int) -> int:
        """The rows computed for a batch, including padding to a graph's size."""
        rows = batch * self._per_request
        at = bisect_left(self._graphs, rows)
        return self._graphs[at] if at < len(self._graphs) else rows

    def measure(self, batch: int, seconds: float) -> None:
        """Record the seconds of an iteration."""
        self._logs[self.computed(batch)] = math.log(seconds)

    def log(self, batch: int) -> float:
        """The log of the expected seconds: nondecreasing in the rows, linear beyond the most measured."""
        asked, rows = self.computed(batch), sorted(self._logs)
        assert rows, "nothing was measured"
        seconds = np.exp(np.maximum.accumulate([self._logs[measured] for measured in rows]))
        beyond = asked - rows[-1]
        if beyond <= 0 or len(rows) == 1:
            return math.log(np.interp(asked, rows, seconds))
        slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
        return math.log(seconds[-1] + slope * beyond)

    def move(self, batch: int, by: float) -> None:
        """Shift all log seconds by a difference: by all of it near `batch`, by half of it far away."""
        near = self.computed(batch)
        for rows in self._logs:
            self._logs[rows] += by / 2 * (1 + 2 ** -abs(math.log2(rows / near)))


class CostModel:
    """Chooses the draft length for every batch size."""

    def __init__(self, max_batch: int, k: int, drafter_k: int = 0, graph_sizes: Sequence[int] = ()) -> None:
        """Begin with guesses of the acceptance; `measure` must follow. On CPUs there are no `graph_sizes`."""
        self.max_batch, self.lengths = max_batch, possible_lengths(k, drafter_k)
        self.acceptance = Acceptance(k, drafter_k)
        self._seconds = {length: Seconds(length, sorted(graph_sizes)) for length in self.lengths}
        self.begin()

    def begin(self) -> None:
        """Reset the averages of one generation; called before and after it."""
        self._average = self.acceptance.tokens()
        self._accepted, self._expected = np.zeros_like(self._average), np.zeros_like(self._average)

    def follow(self, k: int, tokens: float) -> None:
        """Learn from an iteration with drafts of `k` tokens that yielded `tokens` per running request on average.

        Drafts of long responses, for which the others wait, may be worse than the average. The yield of one length says
        nothing about the other lengths, because text may or may not continue the drafter's draft.
        """
        kept = np.full_like(self._average, 1 - 1 / OTHERS_WINDOW)
        kept[k] = 1 - 1 / RUNNING_WINDOW
        self._accepted *= kept
        self._expected *= kept
        self._accepted[k] += tokens - 1
        self._expected[k] += self._average[k] - 1

    def to_measure(self) -> list[tuple[int, int]]:
        """The batch sizes and draft lengths that an engine measures when it starts."""
        sizes = sorted({1 << power for power in range(self.max_batch.bit_length())} | {self.max_batch})
        return [(batch, length) for length in self.lengths for batch in sizes]

    def measure(self, batch: int, k: int, seconds: float) -> None:
        """Record the seconds, including drafting, of an iteration of `batch` requests with drafts of `k` tokens."""
        self._seconds[k].measure(batch, seconds)

    def observe(self, batch: int, k: int, seconds: float) -> None:
        """Learn from an iteration in which all of `batch` requests were decoding.

        The change applies to all draft lengths: growing contexts and slowing machines affect all of them.
        """
        rows = self._seconds[k]
        # A pause of the machine must not count for many iterations.
        change = min(max(math.log(seconds) - rows.log(batch), -math.log(2)), math.log(2)) / TIME_WINDOW
        for length, others in self._seconds.items():
            others.move(batch, change if length == k else SHARED * change)

    def rates(self, batch: int) -> dict[int, float]:
        """The expected tokens per second of all requests at a batch size, by draft length."""
        ratio = (self._accepted + PRIOR_RUNNING) / (self._expected + PRIOR_RUNNING)
        tokens = 1 + (self.acceptance.tokens() - 1) * ratio
        return {k: batch * float(tokens[k]) / math.exp(seconds.log(batch)) for k, seconds in self._seconds.items()}

    def best(self, batch: int) -> int:
        """The length with the most tokens per second; 0 if none clearly surpasses plain decoding."""
        rates = self.rates(batch)
        return max(rates, key=lambda length: rates[length] / (1 + WORTHWHILE if length else 1))
