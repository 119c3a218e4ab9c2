"""The drafter-invariant sampler, which replaces vLLM's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.drafts.acceptance import DraftOutcome, SourceCounts, SpeculationStats, accepted_prefix
from specrl.rollout.drafts.text_acceptance import NO_TEXT, Kind
from specrl.rollout.drafts.text_sources import TextCursor
from specrl.rollout.errors import NonFiniteLogitsError
from specrl.rollout.sampling.inverse_cdf import Picked, logprobs_of, pick_at
from specrl.rollout.vllm.experts.routes import routes_of

SEED = "specrl_seed"
"""The key of a request's seed in the `extra_args` of its `SamplingParams`."""


def seed_argument(seed: int) -> dict[str, Any]:
    """Return the keyword argument of `SamplingParams` that carries a request's seed to the sampler.

    vLLM's own `seed` would make a torch generator for each request, which is never used here and which on CPUs cannot
    be rewound, so that a prompt prefilled in chunks would end in an error.
    """
    return {"extra_args": {SEED: seed}}


def request_seed(params: Any) -> int:
    """Return the seed that `seed_argument` put into a request.

    Raises:
        ValueError: The request has none.
    """
    if SEED not in (params.extra_args or {}):
        raise ValueError("a request reached the sampler without a seed; every request must be given one")
    return int(params.extra_args[SEED])


def score(logits: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
    """Return vLLM's `LogprobsTensors` of the tokens of a prompt, given the logits before each, without their ranks.

    vLLM makes FP32 log-probs of the whole vocabulary first, and passes over them twice more to sort and rank.
    """
    from vllm.v1.outputs import LogprobsTensors

    assert num_logprobs == 0, "a prompt is scored by its own tokens alone"
    ranks = torch.zeros(len(token_ids), dtype=torch.int32, device=logits.device)
    return LogprobsTensors(token_ids[:, None].int(), logprobs_of(logits, token_ids)[:, None], ranks)


@dataclass
class RequestRecord:
    """What the sampler and the drafting keep of one running request."""

    prompt_length: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    started_at: float
    """The end of the first iteration that worked on the prompt, in Unix seconds."""
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    logprobs: list[float] = field(default_factory=list)
    """The log-probs of the response's tokens so far, under the distribution that they were sampled from."""
    log_kept_mass: list[float] = field(default_factory=list)
    """The logarithm of the probability that top-k and top-p left at each of them; see `Picked`."""
    draft: Kind = NO_TEXT
    """The source of the draft that is verified next and, if that is text, its agreement with the response before it."""
    confidences: tuple[float, ...] = ()
    """The drafter's probability of each token of that draft; empty for text."""
    cursors: Mapping[str, TextCursor] = field(default_factory=dict)
    """The place of the response in the text of each source, by the source's name."""
    by_source: dict[str, SourceCounts] = field(default_factory=dict)
    """Counters of its drafts, by the name of their source."""
    unread: list[Any] = field(default_factory=list)
    """What the drafter has yet to read of this request; see `DeferredPrefill`."""
    unread_bytes: int = 0

    def verified(self, drafted: int, accepted: int) -> DraftOutcome:
        """Count the draft that was verified, with the numbers of its tokens, and return its outcome."""
        source, agreement = self.draft
        self.by_source[source] = self.by_source.get(source, SourceCounts()).plus(SourceCounts(1, drafted, accepted))
        return DraftOutcome(source, drafted, accepted, agreement, self.confidences[:drafted])

    @property
    def is_truncated(self) -> bool:
        """Whether top-k or top-p may drop tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    @property
    def counts(self) -> SourceCounts:
        """The counters of all its drafts together."""
        return SourceCounts(*(sum(column) for column in zip(SourceCounts(), *self.by_source.values(), strict=True)))


class PickedRows(NamedTuple):
    """`Picked` as lists, with one value for each row of logits."""

    tokens: list[int]
    logprobs: list[float]
    log_kept_mass: list[float]
    is_finite: list[bool]


def picker(device: torch.device) -> Callable[..., Picked]:
    """Return what picks tokens on a device, with the arguments of `pick_at`: the same tokens on every device."""
    if device.type != "cuda":
        return pick_at
    from specrl.rollout.sampling import kernels

    return kernels.pick


@dataclass
class Iteration:
    """What the sampler did in the engine's last iteration; `ids` and `rows` are in the order of the runner's batch."""

    ids: list[str] = field(default_factory=list)
    """The engine's ids of the requests."""
    rows: list[list[int]] = field(default_factory=list)
    """The tokens that each request got; none while it is still reading its prompt."""
    outcomes: list[DraftOutcome] = field(default_factory=list)
    """The outcomes of the drafts that were verified."""
    all_decoding: bool = False
    """Whether no request was reading its prompt, or its output again after a preemption."""


class InvariantSampler:
    """Replaces the runner's `_sample`: it picks every token, drafted or not, and accepts a draft token that it picks.

    It keeps the log-probs of the picked tokens and the outcomes of the drafts of each request. `records` is keyed by
    the engine's request id; the engine removes the record of a request that ends.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.records: dict[str, RequestRecord] = {}
        self.stats = SpeculationStats()
        self.last = Iteration()
        self._routes = routes_of(runner)
        self._pick_rows = picker(runner.device)

    def install(self) -> None:
        """Take the place of the runner's `_sample`, and of what scores prompts."""
        self.runner._sample = self
        self.runner.sampler.compute_logprobs = lambda logits: logits
        self.runner.sampler.gather_logprobs = score

    def __call__(self, logits: Tensor, metadata: Any) -> Any:
        """Do what `GPUModelRunner._sample` does, for logits [sum of (draft tokens + 1) over requests, vocabulary]."""
        from vllm.v1.outputs import SamplerOutput

        batch = self.runner.input_batch
        ids: list[str] = batch.req_ids
        counts = [0] * len(ids) if metadata is None else metadata.num_draft_tokens
        assert logits.shape[0] == sum(counts) + len(ids), (logits.shape, counts)
        self._admit(ids)
        if self._routes is not None:
            self._routes.keep()
        states = [self.runner.requests[request_id] for request_id in ids]
        # The length of each response before this iteration, and so the index in it of the first picked token.
        starts = [state.num_tokens - state.num_prompt_tokens for state in states]
        picked = self._pick(logits, [self.records[request_id] for request_id in ids], starts, counts)
        drafts = [] if metadata is None else metadata.draft_token_ids.tolist()
        rows = self._verify(ids, starts, counts, picked, drafts)
        width = max(counts) + 1
        padded = [row + [-1] * (width - len(row)) for row in rows]
        sampled = torch.tensor(padded, dtype=torch.int32, device=logits.device)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=None)

    def _admit(self, ids: list[str]) -> None:
        """Make records of requests seen for the first time."""
        for request_id in ids:
            if request_id in self.records:
                continue
            state = self.runner.requests[request_id]
            params = state.sampling_params
            self.records[request_id] = RequestRecord(
                prompt_length=state.num_prompt_tokens,
                seed=request_seed(params),
                temperature=params.temperature,
                top_k=max(params.top_k, 0),
                top_p=params.top_p,
                started_at=time.time(),
                max_tokens=params.max_tokens,
                stop_tokens=frozenset(params.stop_token_ids or ()),
            )

    def _pick(self, logits: Tensor, records: list[RequestRecord], starts: list[int], counts: list[int]) -> PickedRows:
        repeats = np.array(counts) + 1
        offsets = np.concatenate([np.arange(count) for count in repeats])
        first = np.array([record.prompt_length + start for record, start in zip(records, starts, strict=True)])
        settings = (
            np.array([record.temperature for record in records], dtype=np.float32).repeat(repeats),
            np.array([record.top_k for record in records], dtype=np.int64).repeat(repeats),
            np.array([record.top_p for record in records], dtype=np.float32).repeat(repeats),
            np.array([record.seed for record in records], dtype=np.int64).repeat(repeats),
            first.repeat(repeats) + offsets,
        )
        picked = self._pick_rows(logits, *(torch.from_numpy(setting).to(logits.device) for setting in settings))
        return PickedRows(*(values.tolist() for values in picked))

    def _verify(
        self,
        ids: list[str],
        starts: list[int],
        counts: list[int],
        picked: PickedRows,
        drafts: list[int],
    ) -> list[list[int]]:
        """Return the tokens that each request gets, its accepted draft and one more; record log-probs and counters.

        Rows of a prompt's earlier chunks, and of outputs recomputed after a preemption, are thrown away by the runner.
        """
        discarded = self.runner.discard_request_mask.np
        rows: list[list[int]] = []
        outcomes: list[DraftOutcome] = []
        decoding: list[bool] = []
        first = first_draft = 0
        for index, (request_id, start, count) in enumerate(zip(ids, starts, counts, strict=True)):
            record = self.records[request_id]
            drafted = drafts[first_draft : first_draft + count]
            accepted = accepted_prefix(drafted, picked.tokens[first : first + count], record.stop_tokens)
            kept = slice(first, first + accepted + 1)
            rows.append(picked.tokens[kept])
            first, first_draft = first + count + 1, first_draft + count
            # A request that was preempted reads its own output again before it goes on, which counts as a prefill.
            read = int(self.runner.input_batch.num_computed_tokens_cpu[index])
            decoding.append(start > 0 and not discarded[index] and read == record.prompt_length + start - 1)
            if discarded[index]:
                continue
            if not all(picked.is_finite[kept]):
                at = record.prompt_length + start + picked.is_finite[kept].index(False)
                raise NonFiniteLogitsError(
                    f"the policy's logits for token {at} of request {request_id} are not finite: are its weights?"
                )
            record.logprobs[start:] = picked.logprobs[kept]
            record.log_kept_mass[start:] = picked.log_kept_mass[kept]
            if count:
                outcomes.append(record.verified(count, accepted))
        kept_rows = [[] if discarded[index] else row for index, row in enumerate(rows)]
        self.last = Iteration(list(ids), kept_rows, outcomes, all(decoding))
        self.stats += SpeculationStats.of(outcomes, decode_steps=int(any(decoding)))
        return rows
