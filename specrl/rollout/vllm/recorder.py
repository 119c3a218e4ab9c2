"""What an engine's tokens are picked from, recorded; and, for benchmarks, an acceptance that is made up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specrl.rollout.sampling.inverse_cdf import Picked, uniforms, weights
from specrl.rollout.sampling.near_ties import Pick
from specrl.rollout.sampling.verification import Verified


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


class SyntheticAcceptance:
    """Makes up how many tokens of every draft are accepted, whatever they are, so that they come to a given mean.

    It is for benchmarks of a model without a trained drafter alone: what is generated is not the policy's. All the work
    of drafting, verification and sampling is done as ever. Use it as a context manager.
    """

    def __init__(self, sampler: Any, acceptance_length: float, k: int, vocab_size: int) -> None:
        """Prepare for drafts of up to `k` tokens and a mean acceptance length, bonus token included.

        Raises:
            ValueError: The acceptance length is not in [1, k + 1].
        """
        self._sampler, self._sampling, self._vocab_size = sampler, sampler.sampling, vocab_size
        self._rate = rate_for(acceptance_length, k)
        self._generator = torch.Generator(sampler.longest.gpu.device).manual_seed(0)

    def __enter__(self) -> SyntheticAcceptance:
        self._sampler.sampling = self._sampling._replace(verify=self._verify)
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.sampling = self._sampling

    def _verify(self, picked: Tensor, drafts: Tensor, *others: Any) -> Verified:
        """Pretend that the policy has picked the beginning of every draft, then verify as ever."""
        is_right = torch.rand(len(picked), device=picked.device, generator=self._generator) < self._rate
        following = drafts.roll(-1)  # behind a request's last row, whose token no draft decides
        pretended = torch.where(is_right, following, (following + 1) % self._vocab_size)
        verified: Verified = self._sampling.verify(pretended, drafts, *others)
        return verified


def rate_for(acceptance_length: float, k: int) -> float:
    """The rate r at which each next token is accepted, so that 1 + r + r^2 + ... + r^k is the length.

    Raises:
        ValueError: The acceptance length is not in [1, k + 1].
    """
    if not 1 <= acceptance_length <= k + 1:
        raise ValueError(f"an acceptance length of {acceptance_length} is not in [1, {k + 1}], with k = {k}")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**power for power in range(k + 1)) < acceptance_length else (low, rate)
    return (low + high) / 2
