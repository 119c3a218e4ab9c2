"""Recorders inside an engine: what every token was picked from, and which drafts were accepted.

For benchmarks there is also an acceptance that is made up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specrl.rollout.drafts.outcome_log import VerifiedDraft
from specrl.rollout.sampling.inverse_cdf import uniforms, weights
from specrl.rollout.sampling.near_ties import Pick
from specrl.rollout.vllm.sampler import InvariantSampler, PickedRows, request_seed


@dataclass
class Recorder:
    """A context manager that records what the sampler installed in `runner` picks, and changes nothing.

    It is for engines without tensor parallelism. Requests are told apart by their seeds, which must differ within one
    recording.
    """

    runner: Any
    traces: dict[int, dict[int, Pick]] = field(default_factory=dict)
    """The picks, by seed and then by position in the sequence, prompt included."""

    def __enter__(self) -> Recorder:
        self.installed = self.runner._sample
        self.runner._sample = self
        return self

    def __exit__(self, *_: object) -> None:
        self.runner._sample = self.installed

    def __call__(self, logits: Tensor, metadata: Any) -> Any:
        ids = self.runner.input_batch.req_ids
        counts = [0] * len(ids) if metadata is None else metadata.num_draft_tokens
        states = [self.runner.requests[request_id] for request_id in ids]
        starts = [state.num_tokens for state in states]
        # Samplers may change the logits in place.
        output = self.installed(logits.clone(), metadata)
        first = 0
        discarded = self.runner.discard_request_mask.np
        for index, (state, start) in enumerate(zip(states, starts, strict=True)):
            tokens = [token for token in output.sampled_token_ids[index].tolist() if token != -1]
            if not discarded[index]:
                self._record(state.sampling_params, start, logits[first : first + len(tokens)], tokens)
            first += counts[index] + 1
        return output

    def _record(self, params: Any, start: int, logits: Tensor, tokens: list[int]) -> None:
        rows, seed = len(tokens), request_seed(params)
        probs = weights(
            logits,
            torch.full((rows,), params.temperature),
            torch.full((rows,), max(params.top_k, 0)),
            torch.full((rows,), params.top_p),
        ).double()
        probs /= probs.sum(-1, keepdim=True)
        cdf = probs.cumsum(-1)
        best = logits.float().log_softmax(-1).topk(2).values
        u = uniforms(torch.tensor([seed]), torch.arange(start, start + rows)).tolist()
        trace = self.traces.setdefault(seed, {})
        for row, token in enumerate(tokens):
            upper = float(cdf[row, token])
            lower, gap = upper - float(probs[row, token]), float(best[row, 0] - best[row, 1])
            trace[start + row] = Pick(token, u[row], lower, upper, gap, params.temperature == 0)


@dataclass
class DraftLog:
    """A context manager that notes every draft that is verified inside it, and changes nothing."""

    sampler: InvariantSampler
    drafts: list[VerifiedDraft] = field(default_factory=list)

    def __enter__(self) -> DraftLog:
        self._verify = self.sampler._verify
        self.sampler._verify = self  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self.sampler._verify

    def __call__(
        self, ids: list[str], starts: list[int], counts: list[int], picked: PickedRows, drafts: list[int]
    ) -> list[list[int]]:
        rows = self._verify(ids, starts, counts, picked, drafts)
        for request_id, start, count, kept in zip(ids, starts, counts, self.sampler.last.rows, strict=True):
            if count and kept:
                params = self.sampler.runner.requests[request_id].sampling_params
                context = self.sampler.records[request_id].prompt_length + start
                self.drafts.append(VerifiedDraft(request_seed(params), context, count, len(kept) - 1))
        return rows


class SyntheticAcceptance:
    """Makes up how many tokens of every draft are accepted, whatever they are, so that they come to a given mean.

    It is for benchmarks of a model without a trained drafter alone: what is generated is not the policy's. All the work
    of drafting, verification and sampling is done as ever. Use it as a context manager.
    """

    def __init__(self, sampler: InvariantSampler, acceptance_length: float, k: int, vocab_size: int) -> None:
        """Prepare for drafts of up to `k` tokens and a mean acceptance length, bonus token included.

        Raises:
            ValueError: The acceptance length is not in [1, k + 1].
        """
        self._sampler, self._vocab_size = sampler, vocab_size
        self._rate = rate_for(acceptance_length, k)
        self._random = random.Random(0)

    def __enter__(self) -> SyntheticAcceptance:
        self._verify = self._sampler._verify
        self._sampler._verify = self  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._sampler._verify

    def __call__(
        self, ids: list[str], starts: list[int], counts: list[int], picked: PickedRows, drafts: list[int]
    ) -> list[list[int]]:
        """Pretend that the policy has picked the beginning of every draft, then call the sampler's own method."""
        tokens = list(picked.tokens)
        first = first_draft = 0
        for count in counts:
            for index in range(count):
                draft = drafts[first_draft + index]
                if self._random.random() >= self._rate:
                    tokens[first + index] = (draft + 1) % self._vocab_size
                    break
                tokens[first + index] = draft
            first, first_draft = first + count + 1, first_draft + count
        return self._verify(ids, starts, counts, picked._replace(tokens=tokens), drafts)


def rate_for(acceptance_length: float, k: int) -> float:
    """Return the rate r at which each next token is accepted, so that 1 + r + r^2 + ... + r^k is the length.

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
