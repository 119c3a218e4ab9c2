"""How far to draft, by running batch size: the expected tokens of an iteration over its expected seconds.

The seconds are measured when an engine starts, and refreshed by its runs. The tokens come from the counters of drafts,
of those that were verified and of those that might have been. Nothing is tried for its own sake, and nothing is stored.
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
"""The share of the longest length from which on a shorter one is none to choose."""
SHARED = 0.75
"""How much of a change in the time of one draft length is taken to be one of the machine, or of the contexts."""
TIME_WINDOW = 8.0
"""The number of iterations after which an observation of an iteration's time has a weight of 1/e."""
RUNNING_WINDOW, OTHERS_WINDOW, PRIOR_RUNNING = 16.0, 512.0, 1.0
"""The number of iterations after which what a draft length brought the running requests weighs 1/e, while it is in use
and while it is not; and the weight of the average over all requests, in accepted tokens of a request."""
TEXT_WINDOW = 500
"""The number of drafts that older observations of a kind weigh as much as at most."""
KEPT_ON_REFIT = 0.1
"""The factor on the weight of observations of accepted tokens at every refit."""
GUESSED_ACCEPTANCE = 0.6
"""The assumed probability that the next token of a drafter's draft is right, before any was seen."""
EVEN_AGREEMENT = 2.0
"""The number of agreeing tokens at which text is guessed to go on with the right token half of the time."""
PRIOR_DRAFTS, PRIOR_REQUESTS = 4.0, 25.0
"""The weights of these guesses, in drafts, and of that that every request has a draft of the drafter, in requests x
iterations."""
WORTHWHILE = 0.01
"""The share by which tokens per second must be expected to rise for anything to be drafted."""


def possible_lengths(k: int, drafter_k: int) -> tuple[int, ...]:
    """The draft lengths to choose from, the longest and the drafter's longest among them.

    One that is nearly as long as the longest is left out: every length takes graphs.
    """
    return tuple(sorted({*(length for length in LENGTHS if length < NEARLY * k), k, drafter_k}))


class Acceptance:
    """How many tokens of a draft are accepted, by kind and position, and how often a request has a draft of a kind."""

    def __init__(self, k: int, drafter_k: int) -> None:
        """Begin with guesses, for drafts of up to `k` tokens, those of the drafter, if any, of up to `drafter_k`."""
        self._drafter_k = drafter_k
        self._seen, self._right = np.zeros((NOTHING, k)), np.zeros((NOTHING, k))
        self._offered = np.zeros(NOTHING + 1)
        agreements = np.array([*SIZES, *SIZES])
        self._guess = np.append(agreements / (agreements + EVEN_AGREEMENT), [GUESSED_ACCEPTANCE, GUESSED_ACCEPTANCE])

    def learn(self, counts: Counts, passes: int | None = None) -> None:
        """Learn from the counters of a generation, in which drafts of the drafter had at most `passes` tokens."""
        own = slice(0, self._drafter_k if passes is None else passes)
        weights = np.minimum(1, TEXT_WINDOW / np.maximum(self._seen[:, :1], 1))
        self._seen = self._seen * weights + _with_drafters(counts.seen[:NOTHING], own)
        self._right = self._right * weights + _with_drafters(counts.right[:NOTHING], own)
        weight = min(1, TEXT_WINDOW / max(self._offered.sum(), 1))
        self._offered = self._offered * weight + counts.offered

    def fade(self) -> None:
        """Let new observations soon outweigh the old ones, because policy or drafter has changed."""
        self._seen *= KEPT_ON_REFIT
        self._right *= KEPT_ON_REFIT
        self._offered *= KEPT_ON_REFIT

    def by_position(self) -> Floats:
        """The probability that a draft's token is right if those before it are, [kinds, k].

        What has been seen rarely is taken to be as likely as at the position before, and there as it was guessed.
        """
        found, before = [], self._guess
        for seen, right in zip(self._seen.T, self._right.T, strict=True):
            before = (PRIOR_DRAFTS * before + right) / (PRIOR_DRAFTS + seen)
            found.append(before)
        return np.stack(found, 1)

    def accepted(self) -> Floats:
        """The expected accepted tokens of a draft, [k + 1, kinds], by its length."""
        chances = self.by_position().cumprod(1)
        chances[DRAFTERS, self._drafter_k :] = 0
        return np.concatenate([np.zeros((1, NOTHING)), chances.cumsum(1).T])

    def tokens(self) -> Floats:
        """The expected tokens of a request in an iteration, [k + 1], by the length of drafts; 1 without one.

        Before anything is known, requests are taken to have a draft of the drafter, if there is one.
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
    """The seconds of an iteration by its batch size, for one draft length.

    Between the sizes of CUDA graphs an iteration takes as long as at the next larger one.
    """

    def __init__(self, k: int, graph_sizes: Sequence[int]) -> None:
        """Begin with nothing measured. `graph_sizes` are numbers of rows, ascending; a request takes k + 1."""
        self._per_request, self._graphs = k + 1, graph_sizes
        self._rows, self._logs = np.empty(0), np.empty(0)  # rows that were measured, ascending, and logs of the seconds

    def computed(self, batch: int) -> int:
        """The rows that are computed for a batch, those that pad it to a graph's size included."""
        rows = batch * self._per_request
        at = bisect_left(self._graphs, rows)
        return self._graphs[at] if at < len(self._graphs) else rows

    def measure(self, batch: int, seconds: float) -> None:
        """Take the seconds of an iteration."""
        known = dict(zip(self._rows, self._logs, strict=True)) | {float(self.computed(batch)): math.log(seconds)}
        self._rows = np.array(sorted(known))
        self._logs = np.array([known[rows] for rows in self._rows])

    def log(self, batch: int) -> float:
        """The log of the expected seconds: never less for more rows, on a line beyond the most measured."""
        assert len(self._rows), "nothing was measured"
        asked, seconds = self.computed(batch), np.exp(np.maximum.accumulate(self._logs))
        beyond = asked - self._rows[-1]
        if beyond <= 0 or len(self._rows) == 1:
            return math.log(np.interp(asked, self._rows, seconds))
        slope = (seconds[-1] - seconds[-2]) / (self._rows[-1] - self._rows[-2])
        return math.log(seconds[-1] + slope * beyond)

    def move(self, batch: int, by: float) -> None:
        """Move what is known by a difference in log seconds: by all of it near `batch`, by half of it far away."""
        self._logs += by / 2 * (1 + 2 ** -np.abs(np.log2(self._rows / self.computed(batch))))


class CostModel:
    """Chooses the draft length for every batch size."""

    def __init__(
        self,
        max_batch: int,
        k: int,
        drafter_k: int = 0,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        """Begin with guesses of what is accepted; `measure` must follow. On CPUs there are no `graph_sizes`."""
        self.max_batch, self.lengths = max_batch, possible_lengths(k, drafter_k)
        self.acceptance = Acceptance(k, drafter_k)
        self._seconds = {length: Seconds(length, sorted(graph_sizes)) for length in self.lengths}
        self.begin()

    def begin(self) -> None:
        """Forget what drafts brought single requests; before a generation, and after it."""
        self._average = self.acceptance.tokens()
        self._accepted, self._expected = np.zeros_like(self._average), np.zeros_like(self._average)

    def follow(self, k: int, tokens: float) -> None:
        """Learn from an iteration with drafts of `k` tokens, in which the running requests got this many on average.

        Long responses may be drafted worse than others, and they are those that the others wait for. What one length
        brought them says nothing of the others: text may go on where the drafter ends, or not.
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
        """Take the seconds of an iteration of `batch` requests with drafts of `k` tokens, the drafting included."""
        self._seconds[k].measure(batch, seconds)

    def observe(self, batch: int, k: int, seconds: float) -> None:
        """Learn from an iteration in which all of `batch` requests were decoding.

        All draft lengths share what is new: contexts that grow and machines that slow down change all of them.
        """
        rows = self._seconds[k]
        # A pause of the machine must not count for many iterations.
        change = min(max(math.log(seconds) - rows.log(batch), -math.log(2)), math.log(2)) / TIME_WINDOW
        for length, others in self._seconds.items():
            others.move(batch, change if length == k else SHARED * change)

    def rates(self, batch: int) -> dict[int, float]:
        """The tokens per second of all requests that are expected at a batch size, by the length of drafts."""
        ratio = (self._accepted + PRIOR_RUNNING) / (self._expected + PRIOR_RUNNING)
        tokens = 1 + (self.acceptance.tokens() - 1) * ratio
        return {k: batch * float(tokens[k]) / math.exp(seconds.log(batch)) for k, seconds in self._seconds.items()}

    def best(self, batch: int) -> int:
        """The length that brings the most tokens per second; 0 if none clearly surpasses plain decoding."""
        rates = self.rates(batch)
        return max(rates, key=lambda length: rates[length] / (1 + WORTHWHILE if length else 1))
