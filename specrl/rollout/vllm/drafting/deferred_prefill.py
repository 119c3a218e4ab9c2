"""Deferred prefill of the drafter: while no drafts are wanted, it does not read new tokens yet.

The drafter's KV cache must hold every token, or its drafts get worse. But while the controller does not draft, as in
large batches, reading each token at once costs a few per cent of every iteration, and most requests end before anything
is drafted for them. So the policy's features are kept, and the drafter reads them together once drafts are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specrl.rollout.vllm.sampler import RequestRecord

MOST_BYTES = 1 << 29
"""The most bytes of features that are kept for all requests together; beyond that the drafter reads them."""


class Unread(NamedTuple):
    """Consecutive tokens of one request that the drafter has not read."""

    position: int
    """The position of the first feature in the sequence."""
    tokens: list[int]
    """For each feature, the token that follows the feature's own."""
    features: Tensor
    """The policy's hidden states for the drafter to read, [len(tokens), features]."""


class DeferredPrefill:
    """Keeps what the drafter has not read, and lets it read all of it together when drafts are wanted.

    The `arguments` of its methods are those of the runner's `propose_draft_token_ids` without the first.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    def defer(self, records: list[RequestRecord], rows: list[list[int]], arguments: tuple[Any, ...]) -> None:
        """Keep what the drafter would read after an iteration in which every request was decoding."""
        _, _, hidden, _, auxiliary, _, common, _ = arguments
        features = torch.cat(auxiliary, dim=-1) if self.runner.use_aux_hidden_state_outputs else hidden.clone()
        starts = common.query_start_loc_cpu.tolist()
        for record, row, start in zip(records, rows, starts, strict=False):
            # A row's features belong to the token before the row and to its own tokens but the last.
            position = record.prompt_length + len(record.logprobs) - len(row) - 1
            self._drop_unless_adjoining(record, position)
            part = Unread(position, row, features[start : start + len(row)])
            record.unread.append(part)
            record.unread_bytes += part.features.nbytes
        if sum(record.unread_bytes for record in records) > MOST_BYTES:
            self.catch_up(records, arguments)

    def catch_up(self, records: list[RequestRecord], arguments: tuple[Any, ...]) -> None:
        """Let the drafter read what it has not read of these requests, which are the runner's batch in order."""
        waiting = [(row, join(record.unread)) for row, record in enumerate(records) if record.unread]
        if not waiting:
            return
        for chunk in chunks(waiting, self.runner.drafter.max_num_tokens):
            self._read(chunk, arguments)
        for record in records:
            _clear(record)

    def forget_what_was_recomputed(self, records: list[RequestRecord], rows: list[list[int]]) -> None:
        """Forget what was kept of preempted requests: their cache is lost, and the policy reads them anew."""
        for record, row in zip(records, rows, strict=True):
            if row:
                self._drop_unless_adjoining(record, record.prompt_length + len(record.logprobs) - len(row) - 1)
            else:
                _clear(record)

    @staticmethod
    def _drop_unless_adjoining(record: RequestRecord, position: int) -> None:
        if record.unread and record.unread[-1].position + len(record.unread[-1].tokens) != position:
            _clear(record)

    def _read(self, chunk: list[tuple[int, Unread]], arguments: tuple[Any, ...]) -> None:
        """Run the drafter once over tokens of several requests, without asking for drafts."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        drafter, (_, metadata, *_, common, _) = self.runner.drafter, arguments
        device = common.slot_mapping.device
        rows = torch.tensor([row for row, _ in chunk], device=device)
        lengths = torch.tensor([len(part.tokens) for _, part in chunk], dtype=torch.int32)
        ends = torch.tensor([part.position + len(part.tokens) for _, part in chunk], dtype=torch.int32)
        starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        positions = torch.cat([torch.arange(p.position, p.position + len(p.tokens)) for _, p in chunk]).to(device)
        table = common.block_table_tensor[rows]
        owner = torch.arange(len(chunk), device=device).repeat_interleave(lengths.to(device))
        blocks = table[owner, positions // drafter.block_size].long()
        following = torch.tensor([token for _, part in chunk for token in part.tokens], device=device)
        drafter.propose(
            num_speculative_tokens=0,
            # The drafter shifts these back, and takes the last of each request from `next_token_ids`.
            target_token_ids=following.roll(1).int(),
            target_positions=positions,
            target_hidden_states=torch.cat([part.features for _, part in chunk]),
            next_token_ids=following[starts[1:].to(device).long() - 1].int(),
            token_indices_to_sample=None,
            common_attn_metadata=CommonAttentionMetadata(
                query_start_loc=starts.to(device),
                query_start_loc_cpu=starts,
                seq_lens=ends.to(device),
                seq_lens_cpu_upper_bound=ends,
                num_reqs=len(chunk),
                num_actual_tokens=len(following),
                max_query_len=int(lengths.max()),
                max_seq_len=int(ends.max()),
                block_table_tensor=table,
                slot_mapping=blocks * drafter.block_size + positions % drafter.block_size,
            ),
            sampling_metadata=metadata,
        )


def _clear(record: RequestRecord) -> None:
    record.unread.clear()
    record.unread_bytes = 0


def join(parts: list[Unread]) -> Unread:
    """Return adjoining parts as one part."""
    tokens = [token for part in parts for token in part.tokens]
    return Unread(parts[0].position, tokens, torch.cat([part.features for part in parts]))


def chunks(waiting: list[tuple[int, Unread]], most: int) -> Iterator[list[tuple[int, Unread]]]:
    """Split into lists of at most `most` tokens, in order; the tokens of a request may be spread over several lists."""
    chunk: list[tuple[int, Unread]] = []
    room = most
    for row, part in waiting:
        rest = part
        while rest.tokens:
            size = min(room, len(rest.tokens))
            chunk.append((row, Unread(rest.position, rest.tokens[:size], rest.features[:size])))
            rest = Unread(rest.position + size, rest.tokens[size:], rest.features[size:])
            room -= size
            if room == 0:
                yield chunk
                chunk, room = [], most
    if chunk:
        yield chunk
