"""NumPy versions of the Triton kernels of vLLM's model runner, for CPUs.

vLLM's second model runner does its bookkeeping in small Triton kernels, and Triton has no compiler for CPUs. Each
function here receives a launch of one kernel: its grid, and the arguments under the kernel's own names, in lower case
and without "_ptr". It writes what the kernel writes; `tests/exactness/test_cpu_kernels.py` compares them with Triton's
interpreter. Context parallelism, which does not exist on CPUs, is left out.

Arrays share the memory of vLLM's tensors. BF16, which NumPy lacks, is viewed as int16: the kernels only copy it.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.backends import Backend, backends

Array = np.ndarray[Any, Any]
Launch = SimpleNamespace


class StandIn:
    """A function that replaces a Triton kernel, which vLLM calls as `kernel[grid](*arguments, **options)`."""

    def __init__(self, kernel: Any, function: Callable[[Launch], None]) -> None:
        parameters = inspect.signature(kernel.fn).parameters.values()
        self._names = [_short(parameter.name) for parameter in parameters]
        self._defaults = {_short(each.name): each.default for each in parameters if each.default is not each.empty}
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        named = {name: _array(value) for name, value in zip(self._names, arguments, strict=False)}
        others = {_short(name): value for name, value in options.items()}
        self._function(Launch(grid=grid, **{**self._defaults, **named, **others}))


def _short(name: str) -> str:
    return name.lower().removesuffix("_ptr")


def install() -> None:
    """Replace the kernels with these functions; call it before an engine starts."""
    for name, function in STAND_INS.items():
        module, kernel = name.rsplit(".", 1)
        owner = importlib.import_module(f"{RUNNER}.{module}")
        if not isinstance(original := getattr(owner, kernel), StandIn):
            setattr(owner, kernel, StandIn(original, function))


def _array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()


def _table(address: Any, stride: int, rows: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_int32 * (rows * stride)).from_address(int(address))).reshape(rows, stride)


def _set(target: Array, values: Array, padding: int, size: int) -> None:
    target[: len(values)], target[len(values) : size] = values, padding


def prepare_prefill_inputs(a: Launch) -> None:
    for request in range(a.grid[0]):
        row = a.idx_mapping[request]
        done, length = a.num_computed_tokens[row], a.prefill_lens[row]
        if done >= length:
            continue
        first, last = a.query_start_loc[request : request + 2]
        a.input_ids[first:last] = a.all_token_ids[row, done : done + last - first]
        following = done + last - first + np.arange(a.num_lookahead)
        inside = following < length
        a.next_prefill_tokens[: a.num_lookahead, row] = np.where(inside, a.all_token_ids[row, following * inside], 0)


def prepare_pos_seq_lens(a: Launch) -> None:
    count = a.grid[0] - 1
    a.seq_lens[count : a.max_num_reqs] = 0
    for request in range(count):
        done = a.num_computed_tokens[a.idx_mapping[request]]
        first, last = a.query_start_loc[request : request + 2]
        a.seq_lens[request] = done + last - first
        a.pos[first:last] = np.arange(done, done + last - first)


def combine_sampled_and_draft_tokens(a: Launch) -> None:
    for request in range(a.grid[0]):
        row, end, length = a.idx_mapping[request], a.query_start_loc[request + 1], a.seq_lens[request]
        first, last = a.cu_num_logits[request : request + 2]
        count, prefill = last - first, a.prefill_len[row]
        a.logits_indices[first:last] = np.arange(end - count, end)
        if length <= prefill:
            continue
        if a.num_new_sampled_tokens > 0 and length - count >= prefill:
            a.input_ids[end - count] = a.last_sampled_tokens[row, 0]
        drafted = count - a.num_new_sampled_tokens
        if drafted > 0:
            a.input_ids[end - drafted : end] = a.draft_tokens[row, :drafted]


def get_num_sampled_and_rejected(a: Launch) -> None:
    count = a.grid[0]
    reads_prompt = a.seq_lens[:count] < a.prefill_len[a.idx_mapping[:count]]
    a.num_sampled[:count][reads_prompt] = 0
    rejected = np.diff(a.cu_num_logits[: count + 1]) - a.num_sampled[:count]
    a.num_rejected[:count] = np.where(reads_prompt, 0, rejected)


def post_update(a: Launch) -> None:
    for request in range(a.grid[0]):
        row, count = a.idx_mapping[request], a.num_sampled[request]
        if row < 0:
            continue
        if count > 0:
            new, length = a.sampled_tokens[request, :count], a.total_len[row]
            a.last_sampled_tokens[row] = new[-1]
            a.all_token_ids[row, length : length + count] = new
            a.total_len[row] += count
            if a.output_bin_counts is not None:
                np.add.at(a.output_bin_counts[row], new, 1)
        if a.query_start_loc is not None:
            a.num_computed_tokens[row] += a.query_start_loc[request + 1] - a.query_start_loc[request]
        a.num_computed_tokens[row] -= a.num_rejected[request]


def expand_idx_mapping(a: Launch) -> None:
    counts = np.diff(a.cu_num_logits[: a.grid[0] + 1])
    a.expanded_idx_mapping[: counts.sum()] = np.repeat(a.idx_mapping[: a.grid[0]], counts)
    for first, count in zip(a.cu_num_logits, counts, strict=False):
        a.expanded_local_pos[first : first + count] = np.arange(count)


def gather_block_tables(a: Launch) -> None:
    rows = a.batch_idx_to_req_idx[: a.num_reqs]
    for group, num_blocks in enumerate(a.num_blocks):
        stride = int(a.block_table_strides[group])
        source = _table(a.src_block_table_ptrs[group], stride, 1 + int(rows.max(initial=0)))
        target = _table(a.dst_block_table_ptrs[group], stride, a.grid[1])
        target[a.num_reqs :] = 0
        for request, row in enumerate(rows):
            target[request, : num_blocks[row]] = source[row, : num_blocks[row]]


def compute_slot_mappings(a: Launch) -> None:
    assert a.cp_size == 1, "context parallelism does not exist on CPUs"
    rows = a.idx_mapping[: a.grid[1] - 1]
    for group, slots in enumerate(a.slot_mappings):
        slots[a.query_start_loc[len(rows)] : a.max_num_tokens] = a.pad_id
        size, stride = int(a.block_sizes[group]), int(a.block_table_strides[group])
        table = _table(a.block_table_ptrs[group], stride, 1 + int(rows.max(initial=0)))
        for request, row in enumerate(rows):
            part = slice(*a.query_start_loc[request : request + 2])
            if row < 0 or not a.slot_mapping_enabled[group]:
                slots[part] = a.pad_id
                continue
            block, offset = np.divmod(a.pos[part], size)
            slots[part] = table[row, block].astype(np.int64) * size + offset


def apply_write(a: Launch) -> None:
    first = 0
    for write in range(a.grid[0]):
        end, row, start = int(a.write_cu_lens[write]), int(a.write_indices[write]), int(a.write_starts[write])
        output, stride = a.output, a.output_stride
        if a.multi_group:
            stride = int(a.output_stride[a.write_group_ids[write]])
            output = _table(a.output[a.write_group_ids[write]], stride, row + 1)
        output.reshape(-1)[row * stride + start :][: end - first] = a.write_contents[first:end]
        first = end


def gather_draft_sampled(a: Launch) -> None:
    tokens, local = a.logits_indices[: a.num_logits], a.expanded_local_pos[: a.num_logits]
    prefill = a.prefill_len[a.expanded_idx_mapping[: a.num_logits]]
    is_placeholder = (local > 0) & (a.positions[tokens] - local < prefill)
    a.draft_sampled[: a.num_logits] = np.where(is_placeholder, -1, a.input_ids[tokens])
    a.pos[: a.num_logits] = a.positions[tokens]


def prompt_token_ids(a: Launch) -> None:
    for request in range(a.grid[0]):
        row = a.idx_mapping[request]
        first, last = a.query_start_loc[request : request + 2]
        # The token after the last position may lie beyond the table; its log-prob is never used.
        found = a.all_token_ids[row, a.num_computed_tokens[row] + 1 :][: last - first]
        a.prompt_logprobs_token_ids[first : first + len(found)] = found


def drafter_prefill_inputs(a: Launch) -> None:
    count = a.grid[0]
    if not count:
        return
    for request in range(count):
        row, first = a.idx_mapping[request], a.query_start_loc[request]
        last = a.query_start_loc[request + 1] - a.num_rejected[request] - 1
        a.draft_input_ids[first:last] = a.target_input_ids[first + 1 : last + 1]
        is_sampled = a.num_sampled[request] > 0
        a.draft_input_ids[last] = a.last_sampled[row, 0] if is_sampled else a.next_prefill_tokens.reshape(-1)[row]
        a.draft_positions[first : last + 1] = a.target_positions[first : last + 1]
        a.last_token_indices[request] = last
    _set(a.draft_query_start_loc, a.query_start_loc[:count], a.query_start_loc[count], a.max_num_reqs + 1)
    _set(a.draft_seq_lens, a.seq_lens[:count], 0, a.max_num_reqs)
    a.last_token_indices[count : a.max_num_reqs] = 0
    a.draft_current_step[...] = 0


def drafter_decode_inputs(a: Launch) -> None:
    count = a.grid[0] - 1
    a.input_ids[:count] = a.draft_tokens[:count]
    a.sample_src_positions[:count] += 1
    lengths = a.target_seq_lens[:count] - a.num_rejected[:count]
    if a.advance_draft_positions:
        a.positions[:count] = np.minimum(a.positions[:count] + 1, a.max_model_len - 1)
        lengths = np.minimum(lengths + 1, a.max_model_len)
    _set(a.seq_lens, lengths, 0, a.max_num_reqs)
    _set(a.query_start_loc, np.arange(count), count, a.max_num_reqs + 1)


def update_draft_inputs(a: Launch) -> None:
    count, step = a.grid[0], int(a.current_draft_step)
    a.output_draft_tokens[:count, step] = a.draft_tokens[:count]
    if step >= a.num_speculative_steps - 1:
        return
    a.sample_src_positions[:count] += 1
    a.input_ids[:count], a.next_input_hidden_states[:count] = a.draft_tokens[:count], a.hidden_states[:count]
    if a.advance_draft_positions:
        a.positions[:count] = np.minimum(a.positions[:count] + 1, a.max_model_len - 1)
        a.seq_lens[:count] = np.minimum(a.seq_lens[:count] + 1, a.max_model_len)


def draft_model_prefill_inputs(a: Launch) -> None:
    count = a.grid[0]
    if not count:
        return
    for request in range(count):
        first, last = a.query_start_loc[request : request + 2]
        valid, begin = last - first - a.num_rejected[request], first + request
        new = np.zeros(last - first + 1, np.int32)
        new[:valid] = a.target_input_ids[first : first + valid]
        new[valid] = a.last_sampled.reshape(-1)[a.idx_mapping[request]]
        a.out_input_ids[begin : begin + len(new)] = new
        along = a.target_positions[first] + np.arange(len(new))
        a.out_positions[begin : begin + len(new)] = np.minimum(along, a.max_model_len - 1)
        a.last_token_indices[request] = begin + valid
    starts = a.query_start_loc[: count + 1] + np.arange(count + 1)
    _set(a.out_query_start_loc, starts[:count], starts[count], a.max_num_reqs + 1)
    _set(a.out_seq_lens, np.minimum(a.seq_lens[:count] + 1, a.max_model_len), 0, a.max_num_reqs)
    a.last_token_indices[count : a.max_num_reqs] = 0


def ngram_scan(a: Launch) -> None:
    for request, row in enumerate(a.idx_mapping[: a.grid[0]]):
        length, scores = a.total_len[row], a.scratch[request, : a.grid[1]]
        scores[:] = 0
        sequence = a.token_ids[row, :length]
        for size in range(a.min_n, min(a.max_n, length - 1) + 1) if a.num_sampled[request] > 0 else ():
            places = np.arange(length - size)
            for token in range(size):
                places = places[sequence[places + token] == sequence[length - size + token]]
            np.maximum.at(scores, places // a.block_l, size * (a.l + 1) + places + 1)


def ngram_finalize(a: Launch) -> None:
    for request, row in enumerate(a.idx_mapping[: a.grid[0]]):
        score = int(a.scratch[request, : a.n_blocks].max())
        a.drafts[request] = a.last_sampled[row]
        if score > 0 and a.num_sampled[request] > 0:
            size, place = divmod(score - 1, a.l + 1)
            found = a.token_ids[row, place + size : min(place + size + a.k, a.total_len[row])]
            a.drafts[request, : len(found)] = found


RUNNER = "vllm.v1.worker.gpu"
STAND_INS: dict[str, Callable[[Launch], None]] = {
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

if not torch.cuda.is_available():
    # vLLM's CPU build defines Triton kernels only if Triton has a backend of this name. Nothing is compiled with it:
    # torch.compile sees that it is not active.
    backends["cpu"] = Backend(None, SimpleNamespace(is_active=lambda: False))
