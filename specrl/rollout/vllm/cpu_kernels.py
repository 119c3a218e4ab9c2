"""What the Triton kernels of vLLM's model runner compute, in NumPy, for CPUs.

vLLM's second model runner keeps its books in small Triton kernels, and Triton has no compiler for CPUs. Each function
here takes the arguments of one kernel, of which it leaves out those that only shape the launch, and writes what the
kernel writes; `tests/exactness/test_cpu_kernels.py` compares them with Triton's interpreter. Context parallelism, which
does not exist on CPUs, is left out.

The first argument of each is the kernel's grid. Arrays share the memory of vLLM's tensors. BF16, which NumPy lacks, is
seen as int16: the kernels copy it and no more.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
Grid = tuple[int, ...]
STOCK = "SPECRL_STOCK_VLLM"
"""The variable that says that a process is stock vLLM's, which does without these functions."""


class StandIn:
    """A function in the place of a Triton kernel, which vLLM calls as `kernel[grid](*arguments, **options)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, *arguments: Any, **options: Any) -> None:
        named = {name.lower(): value for name, value in options.items()}
        self.function(grid, *(_array(value) for value in arguments), **named)


def install() -> None:
    """Put the functions in the place of the kernels; to be called after `register_backend`, before an engine starts."""
    for name, function in STAND_INS.items():
        module, kernel = name.rsplit(".", 1)
        owner = importlib.import_module(f"{RUNNER}.{module}")
        assert hasattr(owner, kernel), name
        setattr(owner, kernel, StandIn(function))


def register_backend() -> None:
    """Let vLLM's CPU build define Triton kernels, which it does only where Triton has a backend named "cpu".

    Importing this module does it, so that must come before vLLM. Nothing is ever compiled with the backend.
    """
    from triton.backends import Backend, backends

    backends["cpu"] = Backend(_NoCompiler, _NoDriver)


class _NoDriver:
    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)


class _NoCompiler:
    """Only asked for a hash, by the cache of torch.compile."""

    def __init__(self, target: Any) -> None:
        del target

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "no compiler"


def _array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()


def _table(address: Any, stride: int, rows: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_int32 * (rows * stride)).from_address(int(address))).reshape(rows, stride)


def prepare_prefill_inputs(
    grid: Grid,
    input_ids: Array,
    next_tokens: Array,
    _next_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: Array,
    starts: Array,
    all_tokens: Array,
    _all_tokens_stride: int,
    prefill_lens: Array,
    num_computed: Array,
    **_: Any,
) -> None:
    for request in range(grid[0]):
        row = idx_mapping[request]
        done, length = num_computed[row], prefill_lens[row]
        if done >= length:
            continue
        first, last = starts[request : request + 2]
        input_ids[first:last] = all_tokens[row, done : done + last - first]
        following = done + last - first + np.arange(num_lookahead)
        inside = following < length
        next_tokens[:num_lookahead, row] = np.where(inside, all_tokens[row, following * inside], 0)


def prepare_pos_seq_lens(
    grid: Grid,
    positions: Array,
    seq_lens: Array,
    idx_mapping: Array,
    starts: Array,
    num_computed: Array,
    max_num_reqs: int,
    **_: Any,
) -> None:
    count = grid[0] - 1
    seq_lens[count:max_num_reqs] = 0
    for request in range(count):
        done = num_computed[idx_mapping[request]]
        first, last = starts[request : request + 2]
        seq_lens[request] = done + last - first
        positions[first:last] = np.arange(done, done + last - first)


def combine_sampled_and_draft_tokens(
    grid: Grid,
    input_ids: Array,
    idx_mapping: Array,
    last_sampled: Array,
    starts: Array,
    seq_lens: Array,
    prefill_lens: Array,
    drafts: Array,
    _drafts_stride: int,
    first_logits: Array,
    logits_indices: Array,
    num_new_sampled_tokens: int = 1,
    **_: Any,
) -> None:
    for request in range(grid[0]):
        row, end = idx_mapping[request], starts[request + 1]
        num_logits = first_logits[request + 1] - first_logits[request]
        logits_indices[first_logits[request] : first_logits[request + 1]] = np.arange(end - num_logits, end)
        if seq_lens[request] <= prefill_lens[row]:
            continue
        if num_new_sampled_tokens > 0 and seq_lens[request] - num_logits >= prefill_lens[row]:
            input_ids[end - num_logits] = last_sampled[row, 0]
        drafted = num_logits - num_new_sampled_tokens
        if drafted > 0:
            input_ids[end - drafted : end] = drafts[row, :drafted]


def get_num_sampled_and_rejected(
    grid: Grid,
    num_sampled: Array,
    num_rejected: Array,
    seq_lens: Array,
    first_logits: Array,
    idx_mapping: Array,
    prefill_lens: Array,
    **_: Any,
) -> None:
    count = grid[0]
    reads_prompt = seq_lens[:count] < prefill_lens[idx_mapping[:count]]
    num_sampled[:count] = np.where(reads_prompt, 0, num_sampled[:count])
    num_rejected[:count] = np.where(reads_prompt, 0, np.diff(first_logits[: count + 1]) - num_sampled[:count])


def post_update(
    grid: Grid,
    idx_mapping: Array,
    num_computed: Array,
    last_sampled: Array,
    bin_counts: Array | None,
    _bin_counts_stride: int,
    sampled: Array,
    _sampled_stride: int,
    num_sampled: Array,
    num_rejected: Array,
    starts: Array | None,
    all_tokens: Array,
    _all_tokens_stride: int,
    total_lens: Array,
    **_: Any,
) -> None:
    for request in range(grid[0]):
        row, count = idx_mapping[request], num_sampled[request]
        if row < 0:
            continue
        if count > 0:
            new = sampled[request, :count]
            last_sampled[row] = new[-1]
            all_tokens[row, total_lens[row] : total_lens[row] + count] = new
            total_lens[row] += count
            if bin_counts is not None:
                np.add.at(bin_counts[row], new, 1)
        read = 0 if starts is None else starts[request + 1] - starts[request]
        num_computed[row] += read - num_rejected[request]


def expand_idx_mapping(
    grid: Grid, idx_mapping: Array, expanded: Array, local_positions: Array, first_logits: Array, **_: Any
) -> None:
    counts = np.diff(first_logits[: grid[0] + 1])
    expanded[: counts.sum()] = np.repeat(idx_mapping[: grid[0]], counts)
    for request, count in enumerate(counts):
        local_positions[first_logits[request] : first_logits[request + 1]] = np.arange(count)


def gather_block_tables(
    grid: Grid,
    idx_mapping: Array,
    sources: Array,
    targets: Array,
    strides: Array,
    num_blocks: Array,
    _num_blocks_stride: int,
    num_reqs: int,
    **_: Any,
) -> None:
    for group in range(grid[0]):
        stride, rows = int(strides[group]), 1 + int(idx_mapping[:num_reqs].max(initial=0))
        source, target = _table(sources[group], stride, rows), _table(targets[group], stride, grid[1])
        target[num_reqs:] = 0
        for request in range(num_reqs):
            count = num_blocks[group, idx_mapping[request]]
            target[request, :count] = source[idx_mapping[request], :count]


def compute_slot_mappings(
    grid: Grid,
    max_num_tokens: int,
    idx_mapping: Array,
    starts: Array,
    positions: Array,
    tables: Array,
    strides: Array,
    block_sizes: Array,
    enabled: Array,
    _sharded: Array,
    slots: Array,
    _slots_stride: int,
    _rank: int,
    cp_size: int = 1,
    pad_id: int = -1,
    **_: Any,
) -> None:
    assert cp_size == 1, "context parallelism does not exist on CPUs"
    count = grid[1] - 1
    for group in range(grid[0]):
        slots[group, starts[count] : max_num_tokens] = pad_id
        size = int(block_sizes[group])
        table = _table(tables[group], int(strides[group]), 1 + int(idx_mapping[:count].max(initial=0)))
        for request in range(count):
            row, part = idx_mapping[request], slice(starts[request], starts[request + 1])
            if row < 0 or not enabled[group]:
                slots[group, part] = pad_id
                continue
            block, offset = np.divmod(positions[part], size)
            slots[group, part] = table[row, block].astype(np.int64) * size + offset


def apply_write(
    grid: Grid,
    output: Array,
    strides: Any,
    rows: Array,
    starts: Array,
    contents: Array,
    ends: Array,
    groups: Array | None,
    multi_group: bool = False,
    **_: Any,
) -> None:
    first = 0
    for write in range(grid[0]):
        new = contents[first : ends[write]]
        first, row, start = ends[write], int(rows[write]), int(starts[write])
        if multi_group:
            assert groups is not None
            table = _table(output[groups[write]], int(strides[groups[write]]), row + 1)
            table[row, start : start + len(new)] = new
        else:
            output.reshape(-1)[row * strides + start : row * strides + start + len(new)] = new


def gather_draft_sampled(
    grid: Grid,
    drafts: Array,
    draft_positions: Array,
    input_ids: Array,
    positions: Array,
    logits_indices: Array,
    idx_mapping: Array,
    local_positions: Array,
    prefill_lens: Array,
    num_logits: int,
    **_: Any,
) -> None:
    del grid
    tokens, local = logits_indices[:num_logits], local_positions[:num_logits]
    is_placeholder = (local > 0) & (positions[tokens] - local < prefill_lens[idx_mapping[:num_logits]])
    drafts[:num_logits] = np.where(is_placeholder, -1, input_ids[tokens])
    draft_positions[:num_logits] = positions[tokens]


def prompt_token_ids(
    grid: Grid,
    tokens: Array,
    starts: Array,
    idx_mapping: Array,
    num_computed: Array,
    all_tokens: Array,
    _all_tokens_stride: int,
    **_: Any,
) -> None:
    for request in range(grid[0]):
        row, part = idx_mapping[request], slice(starts[request], starts[request + 1])
        # The token after the last position may lie beyond the table; its log-prob is never used.
        found = all_tokens[row, num_computed[row] + 1 :][: part.stop - part.start]
        tokens[part.start : part.start + len(found)] = found


def drafter_prefill_inputs(
    grid: Grid,
    last_indices: Array,
    step: Array,
    input_ids: Array,
    positions: Array,
    starts: Array,
    seq_lens: Array,
    target_ids: Array,
    target_positions: Array,
    idx_mapping: Array,
    last_sampled: Array,
    next_tokens: Array,
    num_sampled: Array,
    num_rejected: Array,
    target_starts: Array,
    target_seq_lens: Array,
    max_num_reqs: int,
    **_: Any,
) -> None:
    count = grid[0]
    if not count:
        return
    for request in range(count):
        row, first = idx_mapping[request], target_starts[request]
        last = target_starts[request + 1] - num_rejected[request] - 1
        input_ids[first:last] = target_ids[first + 1 : last + 1]
        input_ids[last] = last_sampled[row, 0] if num_sampled[request] > 0 else next_tokens.reshape(-1)[row]
        positions[first : last + 1] = target_positions[first : last + 1]
        last_indices[request] = last
    starts[:count], starts[count : max_num_reqs + 1] = target_starts[:count], target_starts[count]
    seq_lens[:count], seq_lens[count:max_num_reqs] = target_seq_lens[:count], 0
    last_indices[count:max_num_reqs] = 0
    step[...] = 0


def drafter_decode_inputs(
    grid: Grid,
    drafts: Array,
    _drafts_stride: int,
    target_seq_lens: Array,
    num_rejected: Array,
    input_ids: Array,
    positions: Array,
    sampled_from: Array,
    starts: Array,
    seq_lens: Array,
    max_model_len: int,
    max_num_reqs: int,
    advance_draft_positions: bool = True,
    **_: Any,
) -> None:
    count = grid[0] - 1
    input_ids[:count] = drafts[:count]
    sampled_from[:count] += 1
    lengths = target_seq_lens[:count] - num_rejected[:count]
    if advance_draft_positions:
        positions[:count] = np.minimum(positions[:count] + 1, max_model_len - 1)
        lengths = np.minimum(lengths + 1, max_model_len)
    seq_lens[:count], seq_lens[count:max_num_reqs] = lengths, 0
    starts[: max_num_reqs + 1] = np.minimum(np.arange(max_num_reqs + 1), count)


def update_draft_inputs(
    grid: Grid,
    output: Array,
    _output_stride: int,
    next_hidden: Array,
    _next_hidden_stride: int,
    input_ids: Array,
    positions: Array,
    sampled_from: Array,
    seq_lens: Array,
    drafts: Array,
    step: Array,
    hidden: Array,
    _hidden_stride: int,
    _hidden_size: int,
    max_model_len: int,
    num_steps: int,
    advance_draft_positions: bool = True,
    **_: Any,
) -> None:
    count = grid[0]
    output[:count, int(step)] = drafts[:count]
    if step >= num_steps - 1:
        return
    sampled_from[:count] += 1
    input_ids[:count], next_hidden[:count] = drafts[:count], hidden[:count]
    if advance_draft_positions:
        positions[:count] = np.minimum(positions[:count] + 1, max_model_len - 1)
        seq_lens[:count] = np.minimum(seq_lens[:count] + 1, max_model_len)


def draft_model_prefill_inputs(
    grid: Grid,
    target_ids: Array,
    target_positions: Array,
    last_sampled: Array,
    idx_mapping: Array,
    input_ids: Array,
    positions: Array,
    last_indices: Array,
    starts: Array,
    seq_lens: Array,
    target_starts: Array,
    target_seq_lens: Array,
    num_rejected: Array,
    max_num_reqs: int,
    max_model_len: int,
    **_: Any,
) -> None:
    count = grid[0]
    if not count:
        return
    for request in range(count):
        first, last = target_starts[request : request + 2]
        valid, begin = last - first - num_rejected[request], first + request
        new = np.zeros(last - first + 1, np.int32)
        new[:valid] = target_ids[first : first + valid]
        new[valid] = last_sampled.reshape(-1)[idx_mapping[request]]
        input_ids[begin : begin + len(new)] = new
        along = target_positions[first] + np.arange(len(new))
        positions[begin : begin + len(new)] = np.minimum(along, max_model_len - 1)
        last_indices[request] = begin + valid
    starts[:count] = target_starts[:count] + np.arange(count)
    starts[count : max_num_reqs + 1] = target_starts[count] + count
    seq_lens[:count], seq_lens[count:max_num_reqs] = np.minimum(target_seq_lens[:count] + 1, max_model_len), 0
    last_indices[count:max_num_reqs] = 0


def ngram_scan(
    grid: Grid,
    all_tokens: Array,
    _all_tokens_stride: int,
    idx_mapping: Array,
    total_lens: Array,
    num_sampled: Array,
    scratch: Array,
    _scratch_stride: int,
    longest: int,
    least: int,
    most: int,
    _most_padded: int,
    block: int,
    **_: Any,
) -> None:
    for request in range(grid[0]):
        length, scores = total_lens[idx_mapping[request]], scratch[request, : grid[1]]
        scores[:] = 0
        sequence = all_tokens[idx_mapping[request], :length]
        for size in range(least, min(most, length - 1) + 1) if num_sampled[request] > 0 else ():
            places = np.arange(length - size)
            for token in range(size):
                places = places[sequence[places + token] == sequence[length - size + token]]
            np.maximum.at(scores, places // block, size * (longest + 1) + places + 1)


def ngram_finalize(
    grid: Grid,
    all_tokens: Array,
    _all_tokens_stride: int,
    idx_mapping: Array,
    total_lens: Array,
    num_sampled: Array,
    last_sampled: Array,
    scratch: Array,
    _scratch_stride: int,
    drafts: Array,
    longest: int,
    num_blocks: int,
    k: int,
    *_: Any,
    **__: Any,
) -> None:
    for request in range(grid[0]):
        row, score = idx_mapping[request], int(scratch[request, :num_blocks].max())
        drafts[request] = last_sampled[row]
        if score > 0 and num_sampled[request] > 0:
            size, place = divmod(score - 1, longest + 1)
            found = all_tokens[row, place + size : min(place + size + k, total_lens[row])]
            drafts[request, : len(found)] = found


RUNNER = "vllm.v1.worker.gpu"
STAND_INS: dict[str, Callable[..., None]] = {
    "input_batch._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
    "input_batch._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
    "input_batch._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
    "input_batch._get_num_sampled_and_rejected_kernel": get_num_sampled_and_rejected,
    "input_batch._post_update_kernel": post_update,
    "input_batch._expand_idx_mapping_kernel": expand_idx_mapping,
    "block_table._gather_block_tables_kernel": gather_block_tables,
    "block_table._compute_slot_mappings_kernel": compute_slot_mappings,
    "buffer_utils._apply_write_kernel": apply_write,
    "sample.prompt_logprob._prompt_logprobs_token_ids_kernel": prompt_token_ids,
    "spec_decode.ngram.speculator._ngram_scan_kernel": ngram_scan,
    "spec_decode.ngram.speculator._ngram_finalize_kernel": ngram_finalize,
    "spec_decode.rejection_sampler._gather_draft_sampled_kernel": gather_draft_sampled,
    "spec_decode.target_dependent_ar.speculator._prepare_prefill_inputs_kernel": drafter_prefill_inputs,
    "spec_decode.target_dependent_ar.speculator._prepare_decode_inputs_kernel": drafter_decode_inputs,
    "spec_decode.target_dependent_ar.speculator._update_draft_inputs_kernel": update_draft_inputs,
    "spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel": draft_model_prefill_inputs,
}
"""The functions by the kernels' names, below `RUNNER`."""

if torch.version.cuda is None and STOCK not in os.environ:
    register_backend()
