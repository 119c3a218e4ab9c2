"""The controller: it chooses draft lengths by running batch size, from what it measures while generating.

Verifying a draft is nearly free while one request runs, and may cost more than it saves when many do. Where the balance
lies depends on the machine, the model, the drafter and the text. No choice changes a token, so the controller may go by
wall time. What it has learned of lengths and their times is stored with a checkpoint, so that a restart need not try
them all again.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.acceptance import DraftOutcome
from specrl.rollout.drafts.budgets import RowCosts, best_budgets
from specrl.rollout.drafts.confidence import Calibration
from specrl.rollout.drafts.curve import CurvePoint
from specrl.rollout.drafts.estimates import NO_DRAFTS, DraftLengths, TokensPerIteration, possible_lengths

CURVE_ITERATIONS = 64
"""The number of latest iterations that a point of the curve is measured over."""


UNSURE = 2
"""The number of standard errors of a difference below which it says nothing."""
MOST_REPEATED = 5
"""The number of trials of the same lengths after which no more are made at once, even if they say nothing."""


def bucket_of(batch: int) -> int:
    """Return the largest of the batch sizes that are treated alike: 1, 2, 4 (for 3 and 4), 8 (for 5 to 8), ..."""
    return 1 << (batch - 1).bit_length()


class TrialCost(NamedTuple):
    """What a trial has found."""

    log_cost: float
    """The log of an iteration's time relative to that with the first chosen lengths."""
    error: float
    """Its standard error. It is large if the machine changed its speed during this trial, or does so in others."""


@dataclass
class Bucket:
    """What the controller knows about one range of batch sizes."""

    chosen: DraftLengths
    """The lengths that are used except in trials."""
    tokens: TokensPerIteration
    """The estimate of tokens per request and iteration at these batch sizes."""
    log_costs: dict[DraftLengths, deque[TrialCost]] = field(default_factory=dict)
    """What each of the latest trials has found, by lengths."""
    recent: list[float] = field(default_factory=list)
    """The seconds of iterations with the chosen lengths since this batch size was entered or a trial was considered."""
    measured: dict[DraftLengths, deque[tuple[int, int, float]]] = field(default_factory=dict)
    """(requests, tokens, seconds) of each of the latest iterations, by the lengths that they used."""

    def log_cost(self, lengths: DraftLengths) -> float | None:
        """Return the mean log cost over the latest trials of the lengths, or None if they were never tried.

        A trial counts by the inverse of its variance.
        """
        trials = self.log_costs.get(lengths)
        return fmean((t.log_cost for t in trials), [t.error**-2 for t in trials]) if trials else None

    def error(self, lengths: DraftLengths) -> float:
        """Return the standard error of the log cost of lengths that were tried."""
        return float(sum(trial.error**-2 for trial in self.log_costs[lengths]) ** -0.5)


@dataclass
class Trial:
    """A trial of other lengths for a few iterations, compared with the chosen lengths before and after it."""

    bucket: int
    lengths: DraftLengths
    before: list[float]
    """The seconds of the iterations before it; `during` and `after` hold seconds as well."""
    size: int
    """The number of iterations to measure with the other lengths, and then with the chosen ones."""
    uses: int = 0
    """The number of iterations so far for which the other lengths were chosen, measured or not."""
    during: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether the other lengths are still to be used; afterwards the chosen ones run for the comparison.

        An iteration that reads prompts cannot be measured. A trial gives up after twice `size` iterations.
        """
        return len(self.during) < self.size and self.uses < 2 * self.size

    def log_ratio(self) -> float:
        """Return the log of the ratio of median times, other lengths over chosen ones.

        The log times before and after are averaged, because times change as requests finish.
        """
        return math.log(median(self.during)) - fmean(
            math.log(median(part)) for part in (self.before, self.after) if part
        )

    def change(self) -> float | None:
        """Return the log of the ratio of median times before and after it; None without one of them."""
        if not (self.before and self.after):
            return None
        return math.log(median(self.before) / median(self.after))


@dataclass
class Spent:
    """Iterations of one bucket with the same lengths."""

    requests: int = 0
    """The sum of their running requests; so in `tokens` and `seconds`."""
    tokens: int = 0
    seconds: float = 0.0


class Controller:
    """Chooses among a few draft lengths, for each bucket of batch sizes, by expected tokens per second.

    Tokens are learned from every iteration, for shorter drafts too (the accepted part of a draft shows what a shorter
    one would have brought), and are shared between buckets. Times are learned from epsilon-greedy trials of the
    neighbours of the chosen lengths and of no drafts at all, so that speculation that does not pay is found out within
    a few iterations. A trial in which the machine changed its speed counts little, and is repeated.

    It also says how much of each draft is verified (`budgets`), by what the tokens of all drafts of the iteration are
    expected to bring and what their rows are expected to take.
    """

    def __init__(self, k: int, replay_k: int, seed: int, settings: ControlSettings | None = None) -> None:
        """Begin with nothing known.

        Args:
            k: The drafter's longest draft, in tokens.
            replay_k: The longest draft from text, in tokens.
            seed: The seed of the random choice of trials.
            settings: The constants that steer it; None for the project's own.
        """
        self._settings = settings or ControlSettings()
        self.choices = possible_lengths(k, replay_k)
        self._random = random.Random(seed)
        self._buckets: dict[int, Bucket] = {}
        self._shared = TokensPerIteration(self.choices, self._settings)
        self.calibration = Calibration(k, self._settings)
        """How likely the drafter's tokens are to be accepted, by its own confidence in them."""
        self._row_costs = RowCosts(self._settings)
        self._drafting: dict[tuple[int, int], float] = {}
        """The running mean of the seconds of drafting, by bucket and the drafter's draft length."""
        self._spent: dict[tuple[int, DraftLengths], Spent] = {}
        """The iterations since `take_saved_seconds` was last called, by bucket and lengths."""
        self._trial: Trial | None = None
        self._unsteadiness = 0.0
        """The running mean of the squared log by which times change in the course of a trial."""
        self._current = 0
        self._iterations = self._lengths = 0

    def choose(self, batch: int) -> DraftLengths:
        """Return the lengths of the next drafts for `batch` running requests."""
        key = bucket_of(batch)
        bucket = self._buckets.get(key) or self._open(key)
        if key != self._current:
            self._finish_trial()
            bucket.recent.clear()
            self._current = key
        if self._trial is None and len(bucket.recent) >= self._settings.trial_iterations:
            self._decide(key)
            candidate = self._candidate(key)
            if candidate is not None:
                size = self._settings.trial_iterations
                self._trial = Trial(key, candidate, bucket.recent[-size:], size)
            bucket.recent.clear()
        lengths = bucket.chosen
        if self._trial is not None and self._trial.runs:
            lengths = self._trial.lengths
            self._trial.uses += 1
        self._iterations += 1
        self._lengths += max(lengths)
        return lengths

    def observe(
        self, batch: int, lengths: DraftLengths, seconds: float | None, outcomes: Sequence[DraftOutcome]
    ) -> None:
        """Learn from an iteration in which all of `batch` requests were decoding.

        Args:
            lengths: The lengths with which the verified drafts were made.
            seconds: The iteration's time; None if the next drafts were made with other lengths in it.
            outcomes: The outcomes of the drafts; a request without a draft got a single token.
        """
        bucket = self._buckets.get(bucket_of(batch)) or self._open(bucket_of(batch))
        self.calibration.observe(outcomes)
        self._shared.observe(batch, lengths, outcomes)
        bucket.tokens.observe(batch, lengths, outcomes)
        if seconds is None:
            return
        tokens = batch + sum(outcome.accepted for outcome in outcomes)
        bucket.measured.setdefault(lengths, deque(maxlen=CURVE_ITERATIONS)).append((batch, tokens, seconds))
        trial = self._trial if self._trial is not None and self._trial.bucket == bucket_of(batch) else None
        if trial is not None and trial.runs:
            if lengths == trial.lengths:
                trial.during.append(seconds)
        elif lengths == bucket.chosen:
            bucket.recent.append(seconds)
            if trial is not None:
                trial.after.append(seconds)
                if len(trial.after) == trial.size:
                    self._finish_trial()

    def observe_parts(self, batch: int, lengths: DraftLengths, drafted: int, drafting: float, rest: float) -> None:
        """Learn what a row of verification takes, from an iteration in which all of `batch` requests were decoding.

        Args:
            lengths: The lengths of the drafts that were made in it.
            drafted: The number of draft tokens that were verified in it.
            drafting: The seconds in which drafts were made.
            rest: The seconds of all else.
        """
        key = bucket_of(batch), lengths.k
        before = self._drafting.get(key, drafting)
        self._drafting[key] = before + (min(drafting, 2 * before) - before) / self._settings.trial_window
        self._row_costs.observe(batch + drafted, rest)

    def spend(self, batch: int, lengths: DraftLengths, tokens: int, seconds: float) -> None:
        """Count an iteration in which all of `batch` requests were decoding, for `take_saved_seconds`.

        Args:
            lengths: The lengths with which the verified drafts were made.
            tokens: The tokens that the requests got in it.
        """
        spent = self._spent.setdefault((bucket_of(batch), lengths), Spent())
        spent.requests += batch
        spent.tokens += tokens
        spent.seconds += seconds

    def take_saved_seconds(self) -> float | None:
        """Return an estimate of the seconds that drafts have saved since the last call, negative where they cost some.

        Plain decoding would have needed an iteration for each token of a request, and each would have taken as long, in
        proportion, as the trials without drafts did at that batch size, or at the nearest that had any.

        Returns:
            None if there were no iterations, or nothing has been tried without drafts yet.
        """
        spent, self._spent = self._spent, {}
        tried = [key for key, bucket in self._buckets.items() if bucket.log_costs.get(NO_DRAFTS)]
        if not spent or not tried:
            return None
        saved = 0.0
        for (key, lengths), found in spent.items():
            nearest = min(tried, key=lambda other: abs(math.log(other / key)))
            used = lengths if nearest == key or lengths == NO_DRAFTS else self._buckets[nearest].chosen
            relative = math.exp(self._log_cost(nearest, NO_DRAFTS) - self._log_cost(nearest, used))
            saved += found.seconds * (found.tokens / found.requests * relative - 1)
        return saved

    def budgets(self, lengths: DraftLengths, chances: NDArray[np.float64]) -> list[int]:
        """Return how many tokens of each draft are worth verifying; all of them while nothing is known of times.

        Args:
            lengths: The lengths with which the drafts were made.
            chances: For each drafted token the probability that it and all before it are accepted, [requests, places];
                0 where a draft is shorter.
        """
        batch, places = chances.shape
        seconds = self._row_costs.seconds(np.arange(batch, batch + batch * places + 1))
        if seconds is None:
            return [int(np.count_nonzero(row)) for row in chances]
        drafting = self._drafting.get((bucket_of(batch), lengths.k), 0.0)
        return best_budgets(chances, seconds + drafting, self._settings.worthwhile)

    def drafter_changed(self) -> None:
        """Let new drafts soon outweigh old ones in what is expected, because weights have changed; times are kept."""
        for tokens in (self._shared, *(bucket.tokens for bucket in self._buckets.values())):
            tokens.fade()
        self.calibration.fade()

    def settled(self, batch: int) -> DraftLengths:
        """Return the lengths settled on for `batch` running requests, without a trial and without taking note."""
        key = bucket_of(batch)
        return self._buckets[key].chosen if key in self._buckets else self._first(key)

    def is_settled(self, batch: int) -> bool:
        """Return whether a batch size is calibrated: all lengths that may be better have been tried."""
        key = bucket_of(batch)
        if key not in self._buckets:
            return False
        return not any(self._is_unknown(key, lengths, gap) for lengths, gap in self._gaps(key).items())

    def chosen(self) -> dict[int, DraftLengths]:
        """Return the lengths chosen in each bucket, by its largest batch size."""
        return {key: self._buckets[key].chosen for key in sorted(self._buckets)}

    def take_mean_length(self) -> float | None:
        """Return the longest draft allowed, in tokens, averaged over the iterations since the last call.

        None if there were no iterations.
        """
        mean = self._lengths / self._iterations if self._iterations else None
        self._iterations = self._lengths = 0
        return mean

    def curve(self) -> list[CurvePoint]:
        """Return a point for all lengths that were measured in each bucket."""
        return [
            CurvePoint.of(key, lengths, list(measured), chosen=lengths == bucket.chosen)
            for key, bucket in sorted(self._buckets.items())
            for lengths, measured in sorted(bucket.measured.items())
        ]

    def _first(self, key: int) -> DraftLengths:
        """Return the lengths that a new bucket begins with: those of the nearest one.

        The first bucket begins with the drafter's longest drafts and the shortest from text: they cost little if wrong.
        """
        if self._buckets:
            nearest = min(self._buckets, key=lambda other: abs(math.log(other / key)))
            return self._buckets[nearest].chosen
        return DraftLengths(self.choices[-1].k, min((c.replay_k for c in self.choices if c.replay_k), default=0))

    def _open(self, key: int) -> Bucket:
        """Begin a bucket with the lengths of `_first`."""
        first = self._first(key)
        tokens = TokensPerIteration(self.choices, self._settings)
        cost = TrialCost(0.0, self._settings.trial_error)
        self._buckets[key] = Bucket(first, tokens, {first: deque([cost], maxlen=self._settings.trial_window)})
        return self._buckets[key]

    def _candidate(self, key: int) -> DraftLengths | None:
        """Return the lengths that are to be tried now, or None."""
        gaps = self._gaps(key)
        unknown = [lengths for lengths, gap in gaps.items() if self._is_unknown(key, lengths, gap)]
        if unknown:
            return min(unknown, key=lambda lengths: (lengths != NO_DRAFTS, gaps[lengths]))
        draw = self._random.random()
        for lengths, gap in gaps.items():
            nearness = min(1.0, max(0.0, 1 - gap / self._settings.plausible))
            draw -= self._settings.exploration * nearness**2 / len(gaps)
            if draw < 0:
                return lengths
        return None

    def _gaps(self, key: int) -> dict[DraftLengths, float]:
        """Return the log tokens per second by which each candidate falls short of the chosen lengths."""
        chosen = self._buckets[key].chosen
        best = self._value(key, chosen)
        return {lengths: best - self._value(key, lengths) for lengths in self._candidates(chosen)}

    def _is_unknown(self, key: int, lengths: DraftLengths, gap: float) -> bool:
        """Return whether to try the lengths as soon as possible.

        They are left alone if they were tried here, and surely enough, or if they are expected to be far worse and were
        tried at the next smaller or larger batch sizes.
        """
        bucket = self._buckets[key]
        if trials := bucket.log_costs.get(lengths):
            error = math.hypot(bucket.error(lengths), bucket.error(bucket.chosen))
            unsure = error > UNSURE * self._settings.trial_error and gap < UNSURE * error
            return unsure and len(trials) < MOST_REPEATED
        nearby = [self._buckets[size].log_costs for size in (key // 2, key * 2) if size in self._buckets]
        return gap < self._settings.plausible or not any(lengths in log_costs for log_costs in nearby)

    def _candidates(self, chosen: DraftLengths) -> list[DraftLengths]:
        """Return the lengths that may be tried beside the chosen ones.

        They are one step away in one of the two lengths, no drafts at all, and the drafter's longest drafts without
        text, which would otherwise be many steps away.
        """
        axes = [sorted({choice[axis] for choice in self.choices}) for axis in range(2)]

        def is_near(lengths: DraftLengths) -> bool:
            steps = [abs(axes[i].index(lengths[i]) - axes[i].index(chosen[i])) for i in range(2)]
            return sum(steps) == 1 or lengths in (NO_DRAFTS, DraftLengths(self.choices[-1].k, 0))

        return [choice for choice in self.choices if choice != chosen and is_near(choice)]

    def _value(self, key: int, lengths: DraftLengths) -> float:
        """Return the log of the tokens per second expected in a bucket, up to a constant of the bucket."""
        return math.log(self._buckets[key].tokens.expected(lengths, self._shared)) - self._log_cost(key, lengths)

    def _log_cost(self, key: int, lengths: DraftLengths) -> float:
        """Return the mean log cost of the lengths, as measured here or guessed.

        The guess adds to the cost of the chosen lengths the difference that the nearest bucket has measured, if any.
        """
        bucket = self._buckets[key]
        cost, base = bucket.log_cost(lengths), bucket.log_cost(bucket.chosen)
        if cost is not None:
            return cost
        assert base is not None, "the chosen lengths have been measured"
        for other in sorted(self._buckets, key=lambda other: abs(math.log(other / key))):
            there, chosen_there = (self._buckets[other].log_cost(item) for item in (lengths, bucket.chosen))
            if there is not None and chosen_there is not None:
                return base + there - chosen_there
        return base

    def _finish_trial(self) -> None:
        """Take what the trial measured, if anything, and choose again."""
        trial, self._trial = self._trial, None
        if trial is None or len(trial.during) < trial.size // 2 or not (trial.before or trial.after):
            return  # too little was measured, or there is nothing to compare it with
        bucket = self._buckets[trial.bucket]
        base = bucket.log_cost(bucket.chosen)
        assert base is not None, "the chosen lengths have been measured"
        trials = bucket.log_costs.setdefault(trial.lengths, deque(maxlen=self._settings.trial_window))
        trials.append(TrialCost(base + trial.log_ratio(), self._error(trial)))
        self._decide(trial.bucket)

    def _error(self, trial: Trial) -> float:
        """Return the standard error of what a trial has found, and learn from it how steady the machine is."""
        change = trial.change()
        if change is not None:
            self._unsteadiness += (change**2 - self._unsteadiness) / self._settings.trial_window
        # The mean of before and after is at most half of a change away from either of them.
        return math.hypot(self._settings.trial_error, (change or 0.0) / 2, math.sqrt(self._unsteadiness) / 2)

    def _decide(self, key: int) -> None:
        """Choose the best of the lengths that have been tried."""
        bucket = self._buckets[key]
        best = max(bucket.log_costs, key=lambda lengths: self._value(key, lengths))
        if self._value(key, best) > self._value(key, bucket.chosen):
            bucket.chosen = best
            bucket.recent.clear()
