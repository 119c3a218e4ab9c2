"""Arguments of vLLM's bookkeeping kernels as in a run, and the comparison of a kernel with what replaces it on CPUs.

It runs in a process of its own: Triton's interpreter must be chosen before vLLM is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.vllm import cpu_kernels

MAX_LENGTH, VOCAB, K, HIDDEN, BLOCK_SIZES = 96, 50, 5, 24, (16, 8)


class Row(NamedTuple):
    """One request of a batch: what it has read, what it reads now, and what comes of it."""

    prefill: int
    computed: int
    scheduled: int
    drafted: int
    sampled: int
    """0 while it reads a part of its prompt."""
    is_dummy: bool


@dataclass
class Launch:
    """A launch of a kernel: its grid, its arguments, and the tensors that it may write."""

    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    written: tuple[Tensor, ...] = ()


class Batch:
    """The tensors of a batch as the runner holds them, the same for the same rows and seed."""

    def __init__(self, rows: list[Row], max_num_reqs: int, seed: int) -> None:
        self.rows, self.count, self.max_num_reqs = rows, len(rows), max_num_reqs
        self.random = np.random.default_rng(seed)
        self.places = self.random.permutation(max_num_reqs)[: self.count]
        self.idx_mapping = torch.tensor(self.places, dtype=torch.int64)
        scheduled = [row.scheduled for row in rows]
        self.num_tokens = sum(scheduled)
        self.starts = self.padded([0, *np.cumsum(scheduled)], max_num_reqs + 1)
        self.first_logits = torch.tensor([0, *np.cumsum([1 + row.drafted for row in rows])], dtype=torch.int32)
        self.num_logits = int(self.first_logits[-1])
        self.prefill = self.states([row.prefill for row in rows])
        self.computed = self.states([row.computed for row in rows])
        self.seq_lens = self.padded([row.computed + row.scheduled for row in rows], max_num_reqs)
        self.all_tokens = self.any((max_num_reqs, MAX_LENGTH), torch.int32)
        self.last_sampled = self.any((max_num_reqs, 1), torch.int64)
        self.drafts = self.any((max_num_reqs, K), torch.int64)
        self.input_ids = self.any((self.num_tokens + 8,), torch.int32)
        along = [np.arange(row.computed, row.computed + row.scheduled) for row in rows]
        self.positions = torch.tensor(np.concatenate([*along, np.zeros(8)]), dtype=torch.int64)
        self.num_sampled = torch.tensor([row.sampled for row in rows], dtype=torch.int32)
        rejected = [1 + row.drafted - row.sampled if row.sampled else 0 for row in rows]
        self.num_rejected = torch.tensor(rejected, dtype=torch.int32)
        ends = self.first_logits.tolist()
        logits = [
            np.arange(end - (b - a), end) for end, a, b in zip(np.cumsum(scheduled), ends, ends[1:], strict=False)
        ]
        self.logits_indices = torch.tensor(np.concatenate([*logits, []]), dtype=torch.int64)
        self.expanded = self.idx_mapping.repeat_interleave(self.first_logits.diff().long())
        local = [np.arange(1 + row.drafted) for row in rows]
        self.local = torch.tensor(np.concatenate([*local, []]), dtype=torch.int32)

    def any(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.tensor(self.random.integers(0, VOCAB, shape), dtype=dtype)

    def padded(self, values: list[Any], size: int) -> Tensor:
        found = self.any((size,), torch.int32)
        found[: len(values)] = torch.tensor(values, dtype=torch.int32)
        return found

    def states(self, values: list[int]) -> Tensor:
        found = self.any((self.max_num_reqs,), torch.int32)
        found[self.idx_mapping] = torch.tensor(values, dtype=torch.int32)
        return found

    def with_dummies(self) -> Tensor:
        mapping = self.idx_mapping.clone()
        mapping[torch.tensor([row.is_dummy for row in self.rows], dtype=torch.bool)] = -1
        return mapping


def prepare_prefill_inputs(batch: Batch) -> Launch:
    ahead, lookahead = batch.any((3, batch.max_num_reqs), torch.int32), 1 + int(batch.random.integers(3))
    tables = batch.idx_mapping, batch.starts, batch.all_tokens, MAX_LENGTH, batch.prefill, batch.computed
    return Launch(
        (batch.count,),
        (batch.input_ids, ahead, ahead.stride(0), lookahead, *tables),
        {"BLOCK_SIZE": 16, "LOOKAHEAD_BLOCK": 4},
        (batch.input_ids, ahead),
    )


def prepare_pos_seq_lens(batch: Batch) -> Launch:
    positions, seq_lens = batch.any((batch.num_tokens + 8,), torch.int64), batch.any((batch.max_num_reqs,), torch.int32)
    tables = batch.idx_mapping, batch.starts, batch.computed, batch.max_num_reqs
    return Launch((batch.count + 1,), (positions, seq_lens, *tables), {"BLOCK_SIZE": 16}, (positions, seq_lens))


def combine_sampled_and_draft_tokens(batch: Batch) -> Launch:
    indices = batch.any((batch.num_logits,), torch.int64)
    tables = batch.idx_mapping, batch.last_sampled, batch.starts, batch.seq_lens, batch.prefill, batch.drafts, K
    arguments = (batch.input_ids, *tables, batch.first_logits, indices)
    options = {"NUM_NEW_SAMPLED_TOKENS": 1, "BLOCK_SIZE": 8}
    return Launch((batch.count,), arguments, options, (batch.input_ids, indices))


def get_num_sampled_and_rejected(batch: Batch) -> Launch:
    rejected = torch.empty_like(batch.num_sampled)
    sampled = batch.num_sampled.clamp(min=1)  # the sampler samples for parts of prompts, too
    tables = batch.seq_lens, batch.first_logits, batch.idx_mapping, batch.prefill
    return Launch((batch.count,), (sampled, rejected, *tables), {}, (sampled, rejected))


def post_update(batch: Batch) -> Launch:
    sampled, counts = batch.any((batch.count, K + 1), torch.int64), batch.any((batch.max_num_reqs, VOCAB), torch.int32)
    total = batch.computed + 1
    counted = counts if batch.random.integers(2) else None
    starts = batch.starts if batch.random.integers(2) else None
    arguments = (batch.with_dummies(), batch.computed, batch.last_sampled, counted, VOCAB, sampled, K + 1)
    results = batch.num_sampled, batch.num_rejected, starts, batch.all_tokens, MAX_LENGTH, total
    written = batch.computed, batch.last_sampled, counts, batch.all_tokens, total
    return Launch((batch.count,), (*arguments, *results), {}, written)


def expand_idx_mapping(batch: Batch) -> Launch:
    expanded, local = batch.any((batch.num_logits,), torch.int64), batch.any((batch.num_logits,), torch.int32)
    arguments = batch.idx_mapping, expanded, local, batch.first_logits
    return Launch((batch.count,), arguments, {"BLOCK_SIZE": 8}, (expanded, local))


def block_tables(batch: Batch) -> tuple[list[Tensor], Tensor, Tensor]:
    tables = [batch.any((batch.max_num_reqs, MAX_LENGTH // size), torch.int32) for size in BLOCK_SIZES]
    return tables, addresses(tables), torch.tensor([table.stride(0) for table in tables])


def addresses(tables: list[Tensor]) -> Tensor:
    return torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64)


def gather_block_tables(batch: Batch) -> Launch:
    sources, from_, strides = block_tables(batch)
    targets, to, _ = block_tables(batch)
    most = MAX_LENGTH // max(BLOCK_SIZES)
    num_blocks = torch.tensor(batch.random.integers(0, most, (len(sources), batch.max_num_reqs)), dtype=torch.int32)
    padded = int(batch.random.integers(batch.count, batch.max_num_reqs + 1))
    arguments = batch.idx_mapping, from_, to, strides, num_blocks, num_blocks.stride(0), batch.count
    return Launch((len(sources), padded), arguments, {"BLOCK_SIZE": 8}, (*targets, *sources))


def compute_slot_mappings(batch: Batch) -> Launch:
    tables, at, strides = block_tables(batch)
    slots = batch.any((len(tables), batch.num_tokens + 8), torch.int64)
    enabled = torch.tensor(batch.random.integers(0, 2, len(tables)), dtype=torch.bool)
    sizes = torch.tensor(BLOCK_SIZES, dtype=torch.int32)
    batch_of = slots.shape[1], batch.with_dummies(), batch.starts, batch.positions
    arguments = *batch_of, at, strides, sizes, enabled, enabled, slots, slots.stride(0), 0
    options = {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": -1, "TRITON_BLOCK_SIZE": 16}
    return Launch((len(tables), batch.count + 1), arguments, options, (slots, *tables))


def apply_write(batch: Batch) -> Launch:
    tables, at, strides = block_tables(batch)
    lengths = batch.random.integers(1, 4, batch.count)
    contents, ends = batch.any((int(lengths.sum()),), torch.int32), torch.tensor(np.cumsum(lengths), dtype=torch.int32)
    rows, starts = batch.idx_mapping.int(), torch.tensor(batch.random.integers(0, 3, batch.count), dtype=torch.int32)
    groups = torch.tensor(batch.random.integers(0, len(tables), batch.count), dtype=torch.int32)
    if batch.random.integers(2):
        arguments: tuple[Any, ...] = (at, strides, rows, starts, contents, ends, groups)
        return Launch((batch.count,), arguments, {"BLOCK_SIZE": 2, "MULTI_GROUP": True}, tuple(tables))
    table = tables[0] if batch.random.integers(2) else batch.any((batch.max_num_reqs,), torch.int32)
    if table.dim() == 1:  # one element for each request
        starts, contents, ends = starts * 0, contents[: batch.count], torch.arange(1, batch.count + 1).int()
    arguments = (table, table.stride(0), rows, starts, contents, ends, None)
    return Launch((batch.count,), arguments, {"BLOCK_SIZE": 2, "MULTI_GROUP": False}, (table,))


def gather_draft_sampled(batch: Batch) -> Launch:
    drafts, positions = batch.any((batch.num_logits,), torch.int32), batch.any((batch.num_logits,), torch.int64)
    inputs = batch.input_ids, batch.positions, batch.logits_indices, batch.expanded, batch.local, batch.prefill
    grid = (-(-batch.num_logits // 8),)
    return Launch(grid, (drafts, positions, *inputs, batch.num_logits), {"BLOCK_SIZE": 8}, (drafts, positions))


def prompt_token_ids(batch: Batch) -> Launch:
    tokens = batch.any((batch.num_tokens,), torch.int64)
    tables = batch.starts, batch.idx_mapping, batch.computed, batch.all_tokens, MAX_LENGTH
    return Launch((batch.count,), (tokens, *tables), {"BLOCK_SIZE": 16}, (tokens,))


def drafter_prefill_inputs(batch: Batch) -> Launch:
    size = batch.max_num_reqs
    last, step = batch.any((size,), torch.int64), torch.tensor(3)
    ids, positions = batch.any((batch.num_tokens + 8,), torch.int32), batch.any((batch.num_tokens + 8,), torch.int64)
    starts, lengths = batch.any((size + 1,), torch.int32), batch.any((size,), torch.int32)
    ahead = batch.any((1, size), torch.int32)
    written = last, step, ids, positions, starts, lengths
    inputs = batch.input_ids, batch.positions, batch.idx_mapping, batch.last_sampled, ahead
    results = batch.num_sampled, batch.num_rejected, batch.starts, batch.seq_lens, size
    return Launch((batch.count,), (*written, *inputs, *results), {"BLOCK_SIZE": 16}, written)


def drafter_decode_inputs(batch: Batch) -> Launch:
    size = batch.max_num_reqs
    drafts = batch.any((batch.count, K), torch.int64)[:, 0]
    ids, positions = batch.any((size,), torch.int32), batch.any((size,), torch.int64)
    sampled_from, starts = batch.any((size,), torch.int64), batch.any((size + 1,), torch.int32)
    lengths = batch.any((size,), torch.int32)
    written = ids, positions, sampled_from, starts, lengths
    arguments = drafts, drafts.stride(0), batch.seq_lens, batch.num_rejected, *written, 40, size
    options = {"BLOCK_SIZE": 16, "ADVANCE_DRAFT_POSITIONS": bool(batch.random.integers(2))}
    return Launch((batch.count + 1,), arguments, options, written)


def update_draft_inputs(batch: Batch) -> Launch:
    size = batch.max_num_reqs
    dtype = torch.bfloat16 if batch.random.integers(2) else torch.float32
    output, step = batch.any((size, K), torch.int64), torch.tensor(int(batch.random.integers(K)))
    hidden, next_hidden = (torch.rand(count, HIDDEN).to(dtype) for count in (batch.count, size))
    hidden.copy_(torch.tensor(batch.random.random((batch.count, HIDDEN))))
    next_hidden.zero_()
    ids, positions = batch.any((size,), torch.int32), batch.any((size,), torch.int64)
    sampled_from, lengths = batch.any((size,), torch.int64), batch.any((size,), torch.int32)
    drafts = batch.any((batch.count,), torch.int64)
    inputs = output, K, next_hidden, HIDDEN, ids, positions, sampled_from, lengths, drafts, step
    options = {"BLOCK_SIZE": 16, "ADVANCE_DRAFT_POSITIONS": bool(batch.random.integers(2))}
    written = output, next_hidden, ids, positions, sampled_from, lengths
    return Launch((batch.count,), (*inputs, hidden, HIDDEN, HIDDEN, 40, K), options, written)


def draft_model_prefill_inputs(batch: Batch) -> Launch:
    size, room = batch.max_num_reqs, batch.num_tokens + batch.count + 8
    ids, positions, last = (
        batch.any((shape,), dtype) for shape, dtype in ((room, torch.int32), (room, torch.int64), (size, torch.int64))
    )
    starts, lengths = batch.any((size + 1,), torch.int32), batch.any((size,), torch.int32)
    inputs = batch.input_ids, batch.positions, batch.last_sampled.int(), batch.idx_mapping
    written = ids, positions, last, starts, lengths
    arguments = *inputs, *written, batch.starts, batch.seq_lens, batch.num_rejected, size, 40
    return Launch((batch.count,), arguments, {"BLOCK_SIZE": 16}, written)


def ngram_tables(batch: Batch) -> tuple[tuple[Any, ...], Tensor]:
    """Sequences of few tokens, so that they repeat themselves, and the scores of blocks of 16 places."""
    tokens = torch.tensor(batch.random.integers(0, 3, (batch.max_num_reqs, MAX_LENGTH)), dtype=torch.int32)
    total = batch.states([row.prefill + row.sampled for row in batch.rows])
    return (tokens, MAX_LENGTH, batch.idx_mapping, total, batch.num_sampled), batch.any((batch.count, 6), torch.int64)


def ngram_scan(batch: Batch) -> Launch:
    tables, scratch = ngram_tables(batch)
    return Launch((batch.count, 6), (*tables, scratch, 6, MAX_LENGTH, 2, 4, 4, 16), {}, (scratch,))


def ngram_finalize(batch: Batch) -> Launch:
    tables, scratch = ngram_tables(batch)
    found = [[batch.random.integers(2) * (3 * (MAX_LENGTH + 1) + 1 + place) for place in range(6)] for _ in batch.rows]
    scratch[:] = torch.tensor(found, dtype=torch.int64).reshape(-1, 6)
    drafts, last = batch.any((batch.count, K), torch.int64), batch.last_sampled.view(-1)
    return Launch((batch.count,), (*tables, last, scratch, 6, drafts, MAX_LENGTH, 6, K, 8, 8), {}, (drafts,))


def compare(name: str, rows: list[Row], max_num_reqs: int, seed: int) -> str | None:
    """Return how the tensors differ that a kernel and the function in its place write; None if they are equal."""
    stand_in = cpu_kernels.STAND_INS[name]
    module, kernel = name.rsplit(".", 1)
    original = getattr(importlib.import_module(f"{cpu_kernels.RUNNER}.{module}"), kernel)
    build: Callable[[Batch], Launch] = globals()[stand_in.__name__]
    right, found = (build(Batch(rows, max_num_reqs, seed)) for _ in range(2))
    original[right.grid](*right.arguments, **right.options)
    cpu_kernels.StandIn(original, stand_in)[found.grid](*found.arguments, **found.options)
    for index, (wanted, given) in enumerate(zip(right.written, found.written, strict=True)):
        if not torch.equal(wanted, given):
            return f"{name}: tensor {index} is\n{given}\nand not\n{wanted}"
    return None
