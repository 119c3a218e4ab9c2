"""What an engine's tokens are picked from, recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specrl.rollout.sampling.inverse_cdf import Picked, uniforms, weights
from specrl.rollout.sampling.near_ties import Pick


@dataclass
class Recorder:
    """A context manager that records what an engine's sampler picks, and changes nothing.

    It is for engines without tensor parallelism. Requests are told apart by their seeds, which must differ within one
    recording.
    """

    sampler: Any
    traces: dict[int, dict[int, Pick]] = field(default_factory=dict)
    """The picks, by seed and then by position in the sequence, prompt included."""

    def __enter__(self) -> Recorder:
        self.sampler.pick, self.sampler.output = self._pick, self._output
        return self

    def __exit__(self, *_: object) -> None:
        del self.sampler.pick, self.sampler.output

    def _pick(self, logits: Tensor, requests: Tensor, positions: Tensor) -> Picked:
        self._logits = logits.clone()
        picked: Picked = type(self.sampler).pick(self.sampler, logits, requests, positions)
        return picked

    def _output(self, batch: Any, positions: Tensor, picked: Picked, *others: Any) -> Any:
        output = type(self.sampler).output(self.sampler, batch, positions, picked, *others)
        states, numbers = self.sampler.sampling_states, batch.idx_mapping
        values = (states.seeds, states.temperature, states.top_k, states.top_p)
        settings = zip(*(value.gpu[numbers].tolist() for value in values), strict=True)
        firsts, counts = batch.cu_num_logits_np.tolist(), output.num_sampled.tolist()
        for first, count, setting in zip(firsts, counts, settings, strict=False):
            if count:
                rows = slice(first, first + count)
                self._record(setting, int(positions[first]) + 1, self._logits[rows], picked.tokens[rows].tolist())
        return output

    def _record(self, setting: tuple[Any, ...], start: int, logits: Tensor, tokens: list[int]) -> None:
        (seed, temperature, top_k, top_p), rows = setting, len(tokens)
        probs = weights(
            logits, torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p)
        ).double()
        probs /= probs.sum(-1, keepdim=True)
        cdf = probs.cumsum(-1)
        best = logits.float().log_softmax(-1).topk(2).values
        u = uniforms(torch.tensor([seed]), torch.arange(start, start + rows)).tolist()
        trace = self.traces.setdefault(seed, {})
        for row, token in enumerate(tokens):
            upper = float(cdf[row, token])
            lower, gap = upper - float(probs[row, token]), float(best[row, 0] - best[row, 1])
            trace[start + row] = Pick(token, u[row], lower, upper, gap, temperature == 0)
