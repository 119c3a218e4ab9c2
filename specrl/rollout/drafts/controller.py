"""How far to draft: the controller picks draft lengths by running batch size from what it measures while generating.

Verifying a draft is nearly free while one request runs and costs as much as it saves when many do; where the balance
lies depends on machine, model, drafter and text. No choice changes a token, so the controller may go by wall time, and
need not survive a restart: a new one starts afresh.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from specrl.rollout.drafts.acceptance import DraftOutcome
from specrl.rollout.drafts.curve import CurvePoint
from specrl.rollout.drafts.estimates import DraftLengths, TokensPerIteration, expected_log_cost, possible_lengths

BLOCK = 4
"""Iterations that a trial measures an arm for; the first after a switch does both arms' work and is left out."""
PATIENCE = 3
EPSILON = 0.1
"""Chance of a trial after each block, were the other arms as good as the chosen one; one worse by the factor e^-g has
e^(-SHYNESS g) of its part."""
SHYNESS = 15.0
REFRESH = 3.0
"""Factor on EPSILON for the REFRESH_ITERATIONS iterations after a drafter changed."""
REFRESH_ITERATIONS = 64
CALIBRATION_TRIALS = 2
"""Trials of each plausible arm in a batch-size bucket before EPSILON limits them; TRIAL_WINDOW for those as good as the
chosen one up to e^-CLOSE, which cost nothing and need the precision."""
CLOSE = 0.05
PLAUSIBLE = 0.3
"""An arm that similar batch sizes show to be worse by more than e^-PLAUSIBLE is not calibrated."""
MARGIN = 0.005
"""A new arm must be better by this much, in log tokens per second."""
TRIAL_WINDOW = 12
"""Trials of an arm that count: older ones are forgotten."""
CUSTOMARY, CUSTOMARY_BATCH = DraftLengths(3, 8), 8
"""What is begun with, and up to which batch size, while nothing is known."""
RATE_WINDOW = 64
"""Iterations of an arm in a bucket that the curve shows."""


def bucket_of(batch: int) -> int:
    """The largest batch size treated like `batch`: 1, 2, 4 (3 and 4), 8 (5 to 8), ..."""
    return 1 << (batch - 1).bit_length()


@dataclass
class Bucket:
    """What is known about one range of batch sizes."""

    chosen: DraftLengths
    tokens: TokensPerIteration
    """Tokens per request and iteration, seen here."""
    log_costs: dict[DraftLengths, deque[float]] = field(default_factory=dict)
    """Log time of an iteration, against the first chosen arm; one value per trial."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=BLOCK))
    """Seconds of the latest iterations with the chosen arm, since this batch size was entered."""
    measured: dict[DraftLengths, deque[tuple[int, int, float]]] = field(default_factory=dict)
    """(requests, tokens, seconds) of the latest iterations of each arm."""

    def log_cost(self, arm: DraftLengths) -> float | None:
        return fmean(self.log_costs[arm]) if self.log_costs.get(arm) else None


@dataclass
class Trial:
    """Another arm for a few iterations, between two blocks of the chosen one that it is compared with."""

    bucket: int
    arm: DraftLengths
    before: list[float]
    uses: int = 0
    during: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """The arm is still to be used; afterwards the chosen one runs for the comparison.

        Gives up when too few iterations can be measured because prompts keep coming in.
        """
        return len(self.during) < BLOCK and self.uses < PATIENCE * BLOCK

    def log_ratio(self) -> float:
        """Log of the arm's time over the chosen arm's, which before and after may differ as requests finish."""
        return math.log(median(self.during)) - fmean(
            math.log(median(part)) for part in (self.before, self.after) if part
        )


class Controller:
    """Chooses among a few arms per bucket: tokens an arm yields, over the time that its iterations take.

    Yields are learned from every iteration, for shorter drafts too (the accepted part of a draft tells what a shorter
    one would have given), and are shared between buckets. Times are learned from trials, epsilon-greedily: neighbours
    of the chosen arm, and not drafting at all. So speculation that does not pay is found out within a few iterations.
    """

    def __init__(self, k: int, replay_k: int, seed: int) -> None:
        self.arms = possible_lengths(k, replay_k)
        self._random = random.Random(seed)
        self._buckets: dict[int, Bucket] = {}
        self._shared = TokensPerIteration(self.arms)
        self._trial: Trial | None = None
        self._current = 0
        self._refresh = 0
        self._iterations = self._lengths = 0
        self._customary = max(arm for arm in self.arms if arm.k <= CUSTOMARY.k and arm.replay_k <= CUSTOMARY.replay_k)

    def choose(self, batch: int) -> DraftLengths:
        """The arm for the next drafts of `batch` running requests."""
        key = bucket_of(batch)
        bucket = self._buckets.get(key) or self._open(key)
        if key != self._current:
            self._finish_trial()
            bucket.recent.clear()
            self._current = key
        if self._trial is None and len(bucket.recent) == BLOCK:
            self._decide(key)
            arm = self._arm_to_try(key)
            if arm is not None:
                self._trial = Trial(key, arm, list(bucket.recent))
            bucket.recent.clear()
        arm = bucket.chosen
        if self._trial is not None and self._trial.runs:
            arm = self._trial.arm
            self._trial.uses += 1
        self._iterations += 1
        self._lengths += max(arm)
        self._refresh = max(0, self._refresh - 1)
        return arm

    def observe(self, batch: int, arm: DraftLengths, seconds: float | None, outcomes: Sequence[DraftOutcome]) -> None:
        """Take what an iteration showed in which all of `batch` requests were decoding.

        Args:
            arm: whose drafts were verified.
            seconds: of the iteration; none when the next drafts were made by another arm.
            outcomes: of the drafts; requests without one got a single token.
        """
        bucket = self._buckets.get(bucket_of(batch)) or self._open(bucket_of(batch))
        self._shared.observe(batch, arm, outcomes)
        bucket.tokens.observe(batch, arm, outcomes)
        if seconds is None:
            return
        tokens = batch + sum(outcome.accepted for outcome in outcomes)
        bucket.measured.setdefault(arm, deque(maxlen=RATE_WINDOW)).append((batch, tokens, seconds))
        trial = self._trial if self._trial is not None and self._trial.bucket == bucket_of(batch) else None
        if trial is not None and trial.runs:
            if arm == trial.arm:
                trial.during.append(seconds)
        elif arm == bucket.chosen:
            bucket.recent.append(seconds)
            if trial is not None:
                trial.after.append(seconds)
                if len(trial.after) == BLOCK:
                    self._finish_trial()

    def drafter_changed(self) -> None:
        """Policy or drafter has new weights: what drafts yield is learned anew, starting from the old; times stay."""
        for tokens in (self._shared, *(bucket.tokens for bucket in self._buckets.values())):
            tokens.fade()
        self._refresh = REFRESH_ITERATIONS

    def is_settled(self, batch: int) -> bool:
        """Whether a batch size is calibrated: from now on only arms that cost next to nothing are tried often."""
        key = bucket_of(batch)
        if key not in self._buckets:
            return False
        return not any(self._wants_calibration(key, arm, gap) for arm, gap in self._gaps(key).items())

    def chosen(self) -> dict[int, DraftLengths]:
        """The arm that each bucket has settled on, by its largest batch size."""
        return {key: self._buckets[key].chosen for key in sorted(self._buckets)}

    def take_mean_length(self) -> float | None:
        """Mean longest draft allowed per iteration since the last call; none without iterations."""
        mean = self._lengths / self._iterations if self._iterations else None
        self._iterations = self._lengths = 0
        return mean

    def curve(self) -> list[CurvePoint]:
        """Every bucket and arm that has been measured."""
        return [
            CurvePoint.of(key, arm, list(measured), chosen=arm == bucket.chosen)
            for key, bucket in sorted(self._buckets.items())
            for arm, measured in sorted(bucket.measured.items())
        ]

    def _open(self, key: int) -> Bucket:
        """A bucket begins with what the nearest one chose; the first of all drafts unless many requests run."""
        if self._buckets:
            nearest = min(self._buckets, key=lambda other: abs(math.log(other / key)))
            first = self._buckets[nearest].chosen
        else:
            first = self._customary if key <= CUSTOMARY_BATCH else DraftLengths(0, 0)
        self._buckets[key] = Bucket(first, TokensPerIteration(self.arms), {first: deque([0.0], maxlen=TRIAL_WINDOW)})
        return self._buckets[key]

    def _arm_to_try(self, key: int) -> DraftLengths | None:
        gaps = self._gaps(key)
        unsure = [arm for arm, gap in gaps.items() if self._is_unsure(key, arm, gap)]
        if unsure:
            return min(unsure, key=lambda arm: (self._num_trials(key, arm), arm != DraftLengths(0, 0), gaps[arm]))
        share = EPSILON * (REFRESH if self._refresh else 1.0) / len(gaps) if gaps else 0.0
        draw = self._random.random()
        for arm, gap in gaps.items():
            draw -= share * math.exp(-SHYNESS * max(0.0, gap))
            if draw < 0:
                return arm
        return None

    def _gaps(self, key: int) -> dict[DraftLengths, float]:
        """Log tokens per second by which each candidate falls short of the chosen arm."""
        chosen = self._buckets[key].chosen
        best = self._value(key, chosen)
        return {arm: best - self._value(key, arm) for arm in self._candidates(chosen)}

    def _num_trials(self, key: int, arm: DraftLengths) -> int:
        return len(self._buckets[key].log_costs.get(arm, ()))

    def _is_unsure(self, key: int, arm: DraftLengths, gap: float) -> bool:
        """Whether to try the arm at once."""
        is_close = 0 < self._num_trials(key, arm) < TRIAL_WINDOW and abs(gap) < CLOSE
        return is_close or self._wants_calibration(key, arm, gap)

    def _wants_calibration(self, key: int, arm: DraftLengths, gap: float) -> bool:
        """Too few trials, unless similar batch sizes show that it is far off."""
        if trials := self._num_trials(key, arm):
            return trials < CALIBRATION_TRIALS
        nearby = [self._buckets[size].log_costs for size in (key // 2, key * 2) if size in self._buckets]
        return gap < PLAUSIBLE or not any(arm in log_costs for log_costs in nearby)

    def _candidates(self, chosen: DraftLengths) -> list[DraftLengths]:
        """One step up or down in one length; the drafter alone, which text may hide; and no drafts at all."""
        axes = [sorted({arm[axis] for arm in self.arms}) for axis in range(2)]

        def is_near(arm: DraftLengths) -> bool:
            steps = [abs(axes[i].index(arm[i]) - axes[i].index(chosen[i])) for i in range(2)]
            return sum(steps) == 1 or arm in (DraftLengths(0, 0), DraftLengths(self._customary.k, 0))

        return [arm for arm in self.arms if arm != chosen and is_near(arm)]

    def _value(self, key: int, arm: DraftLengths) -> float:
        """Log of the tokens per second expected of an arm in a bucket, up to a constant of the bucket."""
        return math.log(self._buckets[key].tokens.expected(arm, self._shared)) - self._log_cost(key, arm)

    def _log_cost(self, key: int, arm: DraftLengths) -> float:
        """Measured here; else as the nearest bucket has it against the arm chosen here; else a guess."""
        bucket = self._buckets[key]
        cost, base = bucket.log_cost(arm), bucket.log_cost(bucket.chosen)
        if cost is not None:
            return cost
        assert base is not None, "the chosen arm has been measured"
        for other in sorted(self._buckets, key=lambda other: abs(math.log(other / key))):
            there, chosen_there = (self._buckets[other].log_cost(a) for a in (arm, bucket.chosen))
            if there is not None and chosen_there is not None:
                return base + there - chosen_there
        return base + expected_log_cost(arm) - expected_log_cost(bucket.chosen)

    def _finish_trial(self) -> None:
        """Take what the trial measured, if anything, and choose again."""
        trial, self._trial = self._trial, None
        if trial is None or len(trial.during) < BLOCK // 2 or not (trial.before or trial.after):
            return  # nothing measured, or nothing to compare with: the chosen arm had just changed
        bucket = self._buckets[trial.bucket]
        base = bucket.log_cost(bucket.chosen)
        assert base is not None, "the chosen arm has been measured"
        costs = bucket.log_costs.setdefault(trial.arm, deque(maxlen=TRIAL_WINDOW))
        costs.append(base + trial.log_ratio())
        self._decide(trial.bucket)

    def _decide(self, key: int) -> None:
        """Choose the best of the arms that have been tried."""
        bucket = self._buckets[key]
        best = max(bucket.log_costs, key=lambda arm: self._value(key, arm))
        if self._value(key, best) > self._value(key, bucket.chosen) + MARGIN:
            bucket.chosen = best
            bucket.recent.clear()
