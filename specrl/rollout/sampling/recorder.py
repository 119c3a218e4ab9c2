"""A recorder of what an engine's tokens are picked from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specrl.precision.near_ties import Pick
from specrl.rollout.sampling.gumbel import Picked, is_limited, noise, weights

LN_2 = math.log(2)
ROWS_TOGETHER = 64
"""The number of rows of logits that are looked at at once: in FP64 they take much memory."""


@dataclass
class Recorder:
    """A context manager that records an engine's picks without changing anything.

    Requests are identified by their seeds, which must differ within one recording.
    """

    sampler: Any
    traces: dict[int, dict[int, Pick]] = field(default_factory=dict)
    """The picks, by seed and then by position in the sequence, prompt included; those inside the prompt and behind the
    end of the response mean nothing."""

    def __enter__(self) -> Recorder:
        self.sampler.pick = self._pick
        return self

    def __exit__(self, *_: object) -> None:
        del self.sampler.pick

    def _pick(self, logits: Tensor, requests: Tensor, positions: Tensor) -> Picked:
        picked: Picked = type(self.sampler).pick(self.sampler, logits, requests, positions)
        of_rows = logits, *self.sampler.settings(requests), positions + 1, picked.tokens
        for rows in zip(*(values.split(ROWS_TOGETHER) for values in of_rows), strict=True):
            self._record(*rows)
        return picked

    def _record(self, *rows: Tensor) -> None:
        logits, temperature, top_k, top_p, seeds, positions, tokens = rows
        chosen, vocab = tokens[:, None], logits.shape[1]
        # Temperature 0 leaves the logits alone, and all others are brought to temperature 1.
        values = logits.double() + noise(seeds, positions, vocab).double() * (LN_2 * temperature.double())[:, None]
        dropped = weights(logits, temperature, top_k, top_p) == 0
        values.masked_fill_(dropped & is_limited(top_k, top_p, vocab)[:, None] & (temperature > 0)[:, None], -torch.inf)
        others = values.scatter(1, chosen, -torch.inf).max(-1)
        leads = values.gather(1, chosen)[:, 0] - others.values
        columns = (column.tolist() for column in (seeds, positions, tokens, leads, others.indices))
        for seed, position, *picked in zip(*columns, strict=True):
            # A pick after a rejected draft token is replaced by the next pick at its position.
            self.traces.setdefault(seed, {})[position] = Pick(*picked)
