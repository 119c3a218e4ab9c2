"""How far training and generation disagree about the sampled tokens.

The measures compare the natural log-probs of the sampled response tokens under the whole distribution at the sampling
temperature, so that they show only numerical differences. Below, p is the engine's probability of a token, q the
trainer's, and r = q / p; expectations over p are means over the tokens (with `top_p` or `top_k`, over the kept ones).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from specrl.distributed import Ranks, sum_arrays

LARGE_RATIO = 2.0  # above it `mismatch/truncated_fraction` counts, and `tis` truncates by default

OCTAVES, PER_OCTAVE = (-30, 6), 64
"""The bins of |log r| go from 2**-30 to 2**6; smaller values are in a bin around 0, larger ones in the last."""
NUM_BINS = (OCTAVES[1] - OCTAVES[0]) * PER_OCTAVE
TOKENS, NOT_NUMBERS, MULT_ERROR, KL, JS, LARGE = range(6)
"""Places in `MismatchSums.totals`: tokens, those whose log r is NaN, the sums of exp(|log r|) and of the terms of KL
and JS, and the tokens whose r is above `LARGE_RATIO`."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MismatchSums:
    """Sums over tokens from which the measures are computed; they are additive over shares.

    For the largest thousandth, a histogram bin's mean stands for its values, with an error below 1/64 of |log r|.
    """

    totals: Floats  # [6]
    counts: Floats  # [NUM_BINS + 1]: tokens by ascending |log r|
    errors: Floats  # [NUM_BINS + 1]: the sum of exp(|log r|) in each bin
    largest: float  # the largest log r; minus infinity without tokens

    @classmethod
    def of(cls, training: ArrayLike, generation: ArrayLike) -> MismatchSums:
        """Count the tokens of a possibly empty share, given both log-probs, [tokens] each."""
        q, p = np.asarray(training, np.float64), np.asarray(generation, np.float64)
        assert q.shape == p.shape, "log-probs of the same tokens"
        x = torch.from_numpy(q - p)  # log r; several times as fast as NumPy here
        error, excess = x.abs().exp(), x.expm1()
        log_mean = (excess / 2).log1p()  # log((1 + r) / 2)
        js = (0.5 * ((excess + 1) * (x - log_mean) - log_mean)).clamp(min=0)
        counted = ((excess - x).sum(), js.sum(), (x > math.log(LARGE_RATIO)).sum())
        bins = ((x.abs().log2() - OCTAVES[0]) * PER_OCTAVE + 1).clamp(0, NUM_BINS).nan_to_num(0).long().numpy()
        return cls(
            totals=np.array([len(x), float(x.isnan().sum()), float(error.sum()), *map(float, counted)], np.float64),
            counts=np.bincount(bins, minlength=NUM_BINS + 1).astype(np.float64),
            errors=np.bincount(bins, error.numpy(), minlength=NUM_BINS + 1).astype(np.float64),
            largest=float(x.max()) if len(x) else -math.inf,
        )

    def __add__(self, other: MismatchSums) -> MismatchSums:
        return MismatchSums(
            self.totals + other.totals,
            self.counts + other.counts,
            self.errors + other.errors,
            float(np.maximum(self.largest, other.largest)),
        )

    def over(self, ranks: Ranks) -> MismatchSums:
        largest = np.zeros(ranks.world_size)  # a place for each rank, so that a sum tells the maximum too
        largest[ranks.rank] = self.largest
        summed = sum_arrays(ranks, np.concatenate([self.totals, self.counts, self.errors, largest]))
        totals, counts, errors, largest = np.split(
            summed, np.cumsum([len(self.totals), len(self.counts), len(self.errors)])
        )
        return MismatchSums(totals, counts, errors, float(largest.max()))

    @property
    def num_tokens(self) -> int:
        return int(self.totals[TOKENS])

    @property
    def token_mult_prob_error(self) -> float:
        """The mean of exp(|log q - log p|); 1 is perfect agreement, and NeMo RL asks for less than 1.1."""
        return self._mean(MULT_ERROR)

    @property
    def bulk_error(self) -> float:
        """`token_mult_prob_error` without the largest thousandth of its terms, and at least without the largest one.

        Rounding can make a token hundreds of times more likely, and one such token among a thousand would weigh as much
        as all others. A single token gives 1, and NaN gives NaN.
        """
        if self.totals[NOT_NUMBERS]:
            return math.nan
        kept = self.num_tokens - max(1, self.num_tokens // 1000)
        if not kept:
            return 1.0
        before = np.cumsum(self.counts) - self.counts
        taken = np.clip(kept - before, 0, self.counts)
        with np.errstate(invalid="ignore", divide="ignore"):
            part = np.where(taken > 0, self.errors * (taken / self.counts), 0.0)
        return float(part.sum() / kept)

    @property
    def kl(self) -> float:
        """Schulman's k3 estimate of KL(p || q) in nats per token: unbiased, with terms r - 1 - log r of at least 0."""
        return self._mean(KL)

    @property
    def js(self) -> float:
        """The Jensen-Shannon divergence in nats per token, between 0 and log 2 in expectation.

        It is E_p[f(r)] with f(r) = (log(2 / (1 + r)) + r log(2 r / (1 + r))) / 2, of which no term is negative: f is
        convex and f(1) = f'(1) = 0.
        """
        return self._mean(JS)

    @property
    def truncated_fraction(self) -> float:
        """The share of the tokens whose ratio truncated importance sampling truncates."""
        return self._mean(LARGE)

    @property
    def importance_ratio_max(self) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(self.largest))

    def metrics(self) -> dict[str, float]:
        if not self.num_tokens:
            return {}
        return {
            "mismatch/token_mult_prob_error": self.token_mult_prob_error,
            "mismatch/bulk_error": self.bulk_error,
            "mismatch/kl": self.kl,
            "mismatch/js": self.js,
            "mismatch/importance_ratio_max": self.importance_ratio_max,
            "mismatch/truncated_fraction": self.truncated_fraction,
        }

    def _mean(self, place: int) -> float:
        return float(self.totals[place] / self.totals[TOKENS])
