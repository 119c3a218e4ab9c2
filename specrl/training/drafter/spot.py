"""Spot training: updates of the drafter by otherwise idle ranks, merged at the end of a step.

A rank trains alone, on features of the last two steps, one micro-step after another. At the end of the step the ranks'
weights are averaged in proportion to their numbers of micro-steps. Drafter weights thus depend on timing; rollouts do
not (invariant 1).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from specrl.distributed import sum_arrays
from specrl.timeline import SPOT_TRAINING
from specrl.training.drafter.trainer import Drafter
from specrl.training.drafter.ttt import metrics_from_sums
from specrl.training.features import Features, padded, sequences
from specrl.training.sample import by_length, even_sample

MICRO_STEP_SECONDS = 0.1
"""The target length of a micro-step; the last engine may have to wait for one."""
STEPS_KEPT = 2
"""The number of steps whose features are kept."""


class SpotTraining:
    """One rank's training of its copy of the drafter between two merges."""

    name = SPOT_TRAINING

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._recent: deque[list[Features]] = deque(maxlen=STEPS_KEPT)
        """The features of each kept step, one entry per sequence."""
        self._waiting: list[list[Features]] = []
        """The remaining micro-batches of the current pass over the kept features."""
        self._passes = 0
        """The number of passes over the currently kept features, including the current pass."""
        self._area = 0
        """The number of padded tokens that a micro-batch may have; 0 allows one sequence."""
        self._random = random.Random(drafter.ranks.rank)
        self._reset()

    def remember(self, features: Sequence[Features | None]) -> None:
        """Keep the features of a step's policy update; None stands for a micro-batch that only other ranks have."""
        self._recent.append([row for item in features if item is not None for row in sequences(item)])
        self._waiting, self._passes = [], 0

    def work(self, stop: Callable[[], bool]) -> bool:
        """Take one micro-step, which is never interrupted, and return True; without features, return False at once.

        The learning rate of the n-th pass is `drafter.online_lr / n`: in a long bubble with dozens of passes over a few
        responses, the drafter would memorise these at the full rate and forget the others.
        """
        if not self._waiting:
            self._waiting, self._passes = self._micro_batches(), self._passes + 1
        if not self._waiting:
            return False
        rows = self._waiting.pop()
        started = time.perf_counter()
        loss, sums, norm = self._drafter.step_alone(padded(rows), self._drafter.config.online_lr / self._passes)
        seconds = time.perf_counter() - started
        area = len(rows) * max(row.tokens.shape[1] for row in rows)
        self._area = max(1, int(area * min(2.0, MICRO_STEP_SECONDS / seconds)))
        self._measured += [loss, norm, *sums.flatten().tolist()]
        self.micro_steps += 1
        return True

    def merge(self) -> dict[str, float]:
        """Average the ranks' drafters; return the metrics of the micro-steps, empty if there were none (collective)."""
        ranks, drafter = self._drafter.ranks, self._drafter
        counts = ranks.gather(self.micro_steps)
        total = sum(counts)
        if not total:
            return {}
        drafter.average(counts[ranks.rank] / total)
        loss, norm, *sums = sum_arrays(ranks, self._measured).tolist()
        self._reset()
        metrics = metrics_from_sums(torch.tensor(sums, dtype=torch.float64).view(-1, 3))
        return {"loss": loss / total, "grad_norm": norm / total, **metrics}

    def _reset(self) -> None:
        self.micro_steps = 0
        self._measured = np.zeros(2 + 3 * (self._drafter.config.ttt_steps + 1))  # loss, norm, and `Tally.sums`

    def _micro_batches(self) -> list[list[Features]]:
        """The kept features as micro-batches of similar length, in random order.

        If they have more than `drafter.max_tokens_per_step` tokens, an even sample by length is used.
        """
        rows = [row for step in self._recent for row in step]
        if not rows:
            return []
        lengths = [row.tokens.shape[1] for row in rows]
        limit = self._drafter.config.max_tokens_per_step
        chosen = even_sample(lengths, self._random.random(), lambda part: sum(lengths[i] for i in part) <= limit)
        batches = [[rows[index] for index in group] for group in by_length(chosen, lengths, self._area)]
        self._random.shuffle(batches)
        return batches
