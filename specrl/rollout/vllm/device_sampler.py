"""The drafter-invariant sampler on vLLM's second model runner: nothing in it waits for the device.

`InvariantSampler` and `InvariantVerifier` replace the runner's `Sampler` and `RejectionSampler`; see `replacements`.
Their results leave with the tokens in vLLM's own output: the columns of a token's log-probs are those of `Columns`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.prompt_logprob import CHUNK_SIZE, PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, gather_draft_sampled

from specrl.rollout.drafts.device_drafts import FACTS, LIMIT, NUM_FACTS
from specrl.rollout.sampling.gumbel import Picked, logprobs_of, pick
from specrl.rollout.sampling.verification import Sampling, Verified, verify
from specrl.rollout.vllm.engine.running import DRAFT_BASE, NUM_COLUMNS, Columns


class InvariantSampler(Sampler):  # type: ignore[misc]
    """Picks a token for every row of logits from the request's seed and the token's position alone."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.sampling = Sampling(pick, verify)
        if arguments["device"].type == "cuda":
            from specrl.rollout.sampling import kernels

            self.sampling = Sampling(kernels.pick, kernels.verify)
        self.req_states.facts = UvaBackedTensor((arguments["max_num_reqs"], NUM_FACTS), torch.int64)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Store a request's `Requests.facts`; those of vLLM's own requests end at the end of the context."""
        super().add_request(req_idx, sampling_params)
        unknown = 0, 0, self.req_states.max_model_len, 0
        self.req_states.facts.np[req_idx] = (sampling_params.extra_args or {}).get(FACTS, unknown)

    def apply_staged_writes(self) -> None:
        """Send what `add_request` stored to the device."""
        super().apply_staged_writes()
        self.req_states.facts.copy_to_uva()

    def __call__(self, logits: Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Pick the next token of each request; drafts are left to `InvariantVerifier`."""
        positions = input_batch.positions[input_batch.logits_indices]
        picked = self.pick(logits, input_batch.expanded_idx_mapping, positions)
        ones = input_batch.seq_lens.new_ones(input_batch.num_reqs)
        drafts = torch.zeros_like(ones)
        return self.output(input_batch, picked, Verified(picked.tokens[:, None], ones), drafts)

    def pick(self, logits: Tensor, requests: Tensor, positions: Tensor) -> Picked:
        """Pick the token that follows each row; `requests` [rows] are the runner's numbers of the rows' requests."""
        return self.sampling.pick(logits, *self.settings(requests), positions + 1)

    def settings(self, requests: Tensor) -> tuple[Tensor, ...]:
        """The temperature, top-k, top-p and seed of each row."""
        states = self.sampling_states
        return tuple(values.gpu[requests] for values in (states.temperature, states.top_k, states.top_p, states.seeds))

    def remaining(self, requests: Tensor) -> Tensor:
        """The number of tokens each request may still get, at least 1; those of a finished request are discarded."""
        found: Tensor = self.req_states.facts.gpu[requests, LIMIT] - self.req_states.total_len.gpu[requests]
        return found.clamp(min=1)

    def output(self, input_batch: InputBatch, picked: Picked, verified: Verified, drafts: Tensor) -> SamplerOutput:
        """vLLM's output for a batch; `drafts`, [requests], describes the verified drafts as `Columns.draft` does."""
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            verified.counts,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        rows, first = len(picked.tokens), input_batch.cu_num_logits[:-1].long()
        columns = Columns(
            picked.logprobs,
            picked.log_kept_mass,
            picked.logprobs.new_empty(rows).index_copy_(0, first, drafts.to(picked.logprobs.dtype)),
        )
        return SamplerOutput(
            sampled_token_ids=verified.tokens,
            logprobs_tensors=LogprobsTensors(
                picked.tokens.new_empty(rows, NUM_COLUMNS),  # tokens and ranks, which nothing reads
                torch.stack(columns, 1),
                picked.tokens.new_empty(rows),
                input_batch.cu_num_logits_np.tolist() if rows != input_batch.num_reqs else None,
            ),
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


class InvariantVerifier(RejectionSampler):  # type: ignore[misc]
    """Accepts a draft token if it is the token that the sampler picks there."""

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Pick a token for every row of logits, and verify the drafts of each request."""
        assert draft_logits is None and invalid_drafts is None, "drafts are greedy, and there are no grammars"
        requests = input_batch.expanded_idx_mapping
        drafts, positions = gather_draft_sampled(
            input_batch.input_ids,
            input_batch.positions,
            input_batch.logits_indices,
            requests,
            input_batch.expanded_local_pos,
            self.sampler.req_states.prefill_len.gpu,
        )
        picked = self.sampler.pick(logits, requests, positions)
        places, starts = input_batch.idx_mapping, input_batch.cu_num_logits
        made, limits = self.sampler.req_states.drafts, self.sampler.remaining(places)
        width = self.num_speculative_steps + 1
        verified = self.sampler.sampling.verify(picked.tokens, drafts, starts, made.stop_tokens, limits, width)
        # The last token of a response is never drafted: verification itself adds it.
        lengths = torch.minimum(made.lengths[places], torch.minimum(starts.diff(), limits) - 1)
        leaving = (made.sources[places] * DRAFT_BASE + lengths).masked_fill_(lengths <= 0, 0)
        return self.sampler.output(input_batch, picked, verified, leaving)


class PromptScorer(PromptLogprobsWorker):  # type: ignore[misc]
    """Scores the tokens of prompts in one pass over their logits; vLLM ranks each token in two more.

    A request that asks for `PromptColumns` also gets the token that it would have sampled in place of each.
    """

    sampler: InvariantSampler | None = None
    """The sampler of the same runner; None while vLLM warms up."""

    def compute_prompt_logprobs(self, logits_fn: Any, hidden_states: Tensor, batch: InputBatch, *others: Any) -> Any:
        """Like vLLM's method, but with the rows of the batch instead of `logits_fn`, for `score`."""
        return super().compute_prompt_logprobs(Rows(logits_fn, batch, self.sampler), hidden_states, batch, *others)


class Rows(NamedTuple):
    """The rows of a batch with prompts."""

    logits_of: Callable[[Tensor], Tensor]
    batch: InputBatch
    sampler: InvariantSampler | None

    def picked(self, logits: Tensor, first: int) -> Picked:
        """The tokens that the requests would sample after the rows from `first` on, given the rows' logits."""
        batch, rows = self.batch, slice(first, first + len(logits))
        if self.sampler is None:
            zeros = logits.new_zeros(len(logits))
            return Picked(zeros.long(), zeros, zeros)
        counts = batch.query_start_loc[: batch.num_reqs + 1].diff()
        requests = batch.idx_mapping.repeat_interleave(counts, output_size=batch.num_tokens)
        return self.sampler.pick(logits, requests[rows], batch.positions[: batch.num_tokens][rows])


def score(token_ids: Tensor, hidden: Tensor, rows: Rows, num_logprobs: int, _: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that follow each row and those picked there, their `PromptColumns`, and zeros for vLLM's ranks."""
    token_ids, picks, columns = token_ids.long(), [], []
    for first in range(0, len(token_ids), CHUNK_SIZE):
        logits = rows.logits_of(hidden[first : first + CHUNK_SIZE])
        found = [logprobs_of(logits, token_ids[first : first + CHUNK_SIZE])]
        if num_logprobs:
            picked = rows.picked(logits, first)
            picks.append(picked.tokens)
            found += [picked.logprobs, picked.log_kept_mass]
        columns.append(torch.stack(found, 1))
    ids = [token_ids, *([torch.cat(picks)] * num_logprobs if picks else [])]
    return torch.stack(ids, 1), torch.cat(columns), torch.zeros_like(token_ids)
