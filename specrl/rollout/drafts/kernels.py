"""`DeviceDrafts` in Triton, for GPUs: one launch to compare drafts and one to choose them, a program per request.

Every value is an integer or a copy, so the results equal PyTorch's bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specrl.rollout.drafts import device_drafts, text_index
from specrl.rollout.drafts.device_drafts import Batch, DeviceDrafts, Requests
from specrl.rollout.drafts.text_index import TextIndex

END = tl.constexpr(text_index.END)
LONGEST = tl.constexpr(text_index.LONGEST)
SIZES = tl.constexpr(len(text_index.SIZES))
ANY_PROMPT = tl.constexpr(text_index.ANY_PROMPT)
STORED = tl.constexpr(text_index.STORED)
RECENT_TEXT = tl.constexpr(text_index.RECENT_TEXT)
DRAFTERS = tl.constexpr(text_index.DRAFTERS)
CONTINUED = tl.constexpr(text_index.CONTINUED)
NOTHING = tl.constexpr(text_index.NOTHING)
KINDS = tl.constexpr(device_drafts.KINDS)
CANDIDATES = tl.constexpr(device_drafts.CANDIDATES)
ROWS = tl.constexpr(triton.next_power_of_2(device_drafts.CANDIDATES))
NUMBER = tl.constexpr(device_drafts.NUMBER)
LIMIT = tl.constexpr(device_drafts.LIMIT)
START = tl.constexpr(device_drafts.START)
FACTS = tl.constexpr(device_drafts.NUM_FACTS)


class TritonDrafts(DeviceDrafts):
    """Chooses drafts and counts how often each kind is right, with two kernels."""

    def observe(self, requests: Requests, batch: Batch) -> None:
        """Count the outcomes of predictions, as `DeviceDrafts.observe` does."""
        asked = *batch, requests.facts, requests.lengths, requests.tokens, requests.tokens.stride(0)
        made = self.made_at, self.tokens, self.kinds
        columns = triton.next_power_of_2(self.k)
        compare[(len(batch.slots),)](*asked, *made, self.by_kind, self.k, columns, num_warps=1)

    def choose(self, requests: Requests, batch: Batch, drafter: Tensor | None, length: int) -> Tensor:
        """Choose the next drafts, as `DeviceDrafts.choose` does."""
        drafts = torch.empty(len(batch.slots), self.k, dtype=torch.int64, device=self.device)
        asked = batch.slots, *requests, requests.tokens.stride(0)
        made = (drafts, 0, 0) if drafter is None else (drafter, drafter.stride(0), drafter.shape[1])
        decides = self.expected, self.behind, max(length, 1)
        noted = self.made_at, self.tokens, self.kinds, self.offered, int(self.offers(drafter))
        chosen = self.sources, self.lengths, drafts, self.k
        stops = self.stop_tokens, len(self.stop_tokens)
        widths = triton.next_power_of_2(max(stops[1], 1)), triton.next_power_of_2(self.k)
        find_drafts[(len(drafts),)](
            *asked, *_searched(self.index), *made, *decides, *noted, *chosen, *stops, *widths, num_warps=1
        )
        return drafts


def _searched(index: TextIndex) -> tuple[Tensor | int, ...]:
    text = index.tokens, len(index.tokens), index.hashing, index.last_of_size
    return *text, index.keys, index.places, len(index.keys), (len(index.keys) - 1).bit_length()


@triton.jit(do_not_specialize=["stride"])
def compare(
    slots,
    num_sampled,
    facts,
    lengths,
    all_tokens,
    stride,
    made_at,
    predictions,
    kinds,
    by_kind,
    k,
    columns: tl.constexpr,
):
    """Count the outcomes of a request's predictions."""
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    new = tl.load(num_sampled + request).to(tl.int64)
    before = tl.load(lengths + slot).to(tl.int64) - new
    number = tl.load(facts + slot * FACTS + NUMBER)
    is_next = (tl.load(made_at + 2 * slot) == number) & (tl.load(made_at + 2 * slot + 1) == before)

    candidate, column = tl.arange(0, ROWS), tl.arange(0, columns)
    is_candidate = candidate < CANDIDATES
    came = is_next & (column < k) & (column < new)
    sampled = tl.load(all_tokens + slot * stride + before + column, mask=came, other=END).to(tl.int64)
    at = slot * CANDIDATES + candidate
    predicted = tl.load(predictions + at[:, None] * k + column, mask=is_candidate[:, None] & came, other=END)
    first_wrong = tl.min(tl.where((predicted != END) & (predicted == sampled[None, :]), columns, column[None, :]), 1)
    counted = by_kind + tl.load(kinds + at, mask=is_candidate, other=NOTHING)[:, None] * 2 * k + column
    one = tl.full((ROWS, columns), 1, tl.int64)
    tl.atomic_add(counted, one, mask=(predicted != END) & (column[None, :] <= first_wrong[:, None]))
    tl.atomic_add(counted + k, one, mask=column[None, :] < first_wrong[:, None])


@triton.jit(
    do_not_specialize=[
        *("stride", "num_tokens", "num_keys", "key_steps"),
        *("drafter_stride", "passes", "draft_length", "offers", "num_stops"),
    ]
)
def find_drafts(
    slots,
    facts,
    lengths,
    all_tokens,
    stride,
    text,
    num_tokens,
    hashing,
    last_of_size,
    keys,
    places,
    num_keys,
    key_steps,
    drafter,
    drafter_stride,
    passes,
    expected,
    worth_behind,
    draft_length,
    made_at,
    predictions,
    kinds,
    offered,
    offers,
    sources,
    draft_lengths,
    drafts,
    k,
    stop_tokens,
    num_stops,
    all_stops: tl.constexpr,
    columns: tl.constexpr,
):
    """Find all candidates of a request, store them for comparison, and choose one."""
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    facts, drafter = facts + slot * FACTS, drafter + request * drafter_stride
    length, first = tl.load(lengths + slot).to(tl.int64), tl.load(facts + START)
    response, none = all_tokens + slot * stride, num_tokens - 1
    searched = keys, places, num_keys, key_steps, hashing, last_of_size
    written, made = (response, length, first), (drafter, passes, draft_length)
    behind = worth_behind + (draft_length * (k + 1) + passes) * KINDS
    found, kind, worth_after = _candidates(searched, tl.load(facts), written, made, behind, none)

    # Verification adds a token after a draft, which must fit too. A response may be computed for one more iteration
    # before vLLM learns that it has ended: nothing is predicted for it.
    latest = tl.load(response + length - 1).to(tl.int64)
    has_ended = _is_stop(latest, stop_tokens, num_stops, all_stops) & (length > first)
    room = tl.where(has_ended, 0, tl.minimum(tl.load(facts + LIMIT) - length - 1, k))
    tokens, ends = _drafts_at(found, text, drafter, passes, room, none, columns)
    candidate, column = tl.arange(0, ROWS), tl.arange(0, columns)
    kind = tl.where((candidate == CANDIDATES - 1) & (ends > passes), CONTINUED, kind)
    kind = tl.where(ends == 0, NOTHING, kind).to(tl.int64)
    worth = tl.where(kind == CONTINUED, worth_after, tl.load(expected + draft_length * KINDS + kind))
    is_chosen = candidate == tl.argmax(worth, 0)

    tl.store(made_at + 2 * slot, tl.load(facts + NUMBER))
    tl.store(made_at + 2 * slot + 1, length)
    is_candidate, noted = candidate < CANDIDATES, slot * CANDIDATES + candidate
    tl.store(predictions + noted[:, None] * k + column, tokens, mask=is_candidate[:, None] & (column < k))
    tl.store(kinds + noted, kind, mask=is_candidate)
    of_kind = tl.sum(tl.where(is_chosen, kind, 0))
    tl.atomic_add(offered + of_kind, tl.full((), 1, tl.int64), mask=(offers != 0) & (room > 0))
    source = (of_kind >= RECENT_TEXT).to(tl.int32) + (of_kind >= DRAFTERS).to(tl.int32)
    tl.store(sources + slot, source + (of_kind == CONTINUED).to(tl.int32))
    tl.store(draft_lengths + slot, tl.sum(tl.where(is_chosen, ends, 0)).to(tl.int32))
    draft = tl.sum(tl.where(is_chosen[:, None], tokens, 0), 0)
    tl.store(drafts + request * k + column, tl.where(draft == END, latest, draft), mask=column < k)


@triton.jit
def _candidates(searched, prompt, written, made, worth_behind, none):
    """Where in the text each candidate starts, its kind, and the value of the drafter's draft continued by text."""
    response, length, first = written
    _, passes, _ = made
    candidate, back = tl.arange(0, ROWS), tl.arange(0, LONGEST)
    is_text, is_drafters = candidate < CANDIDATES - 1, candidate == CANDIDATES - 1
    owner, first_kind = tl.where(candidate == 0, prompt, ANY_PROMPT), tl.where(candidate == 0, STORED, RECENT_TEXT)
    in_response = length - 1 - back >= first
    last = tl.load(response + length - 1 - back, mask=in_response, other=END).to(tl.int64)
    found, kind = _by_last(*searched, last, owner, first_kind, none)
    after, worth_after = _continuing(searched, owner, first_kind, *made, *written, worth_behind, none)
    found = tl.where(is_text, found, tl.where(is_drafters, after - passes, none))
    return found, tl.where(is_text, kind, DRAFTERS), worth_after


@triton.jit
def _drafts_at(found, text, drafter, passes, room, none, columns: tl.constexpr):
    """The tokens of each candidate, with `END` after its end and beyond `room`, and their number."""
    candidate, column = tl.arange(0, ROWS), tl.arange(0, columns)
    ahead = tl.maximum(tl.minimum(found[:, None] + column[None, :], none), 0)
    tokens = tl.load(text + ahead).to(tl.int64)
    from_drafter = tl.load(drafter + column, mask=column < passes, other=END)
    is_drafters = (candidate == CANDIDATES - 1)[:, None] & (column < passes)[None, :]
    tokens = tl.where(is_drafters, from_drafter[None, :], tokens)
    ends = tl.min(tl.where(tokens == END, column[None, :], columns), 1)
    ends = tl.maximum(tl.minimum(ends.to(tl.int64), room), 0)
    return tl.where(column[None, :] < ends[:, None], tokens, END), ends


@triton.jit
def _is_stop(token, stop_tokens, num_stops, all_stops: tl.constexpr):
    stop = tl.arange(0, all_stops)
    is_stop = (stop < num_stops) & (tl.load(stop_tokens + stop, mask=stop < num_stops, other=END) == token)
    return tl.max(is_stop.to(tl.int32)) > 0


@triton.jit
def _continuing(searched, owner, first_kind, drafter, passes, draft_length, response, length, first, worth, none):
    """The place of text that continues the drafter's tokens, found as if they were sampled, and the value of both."""
    back, candidate = tl.arange(0, LONGEST), tl.arange(0, ROWS)
    earlier = length - 1 - back + passes
    is_earlier = (back >= passes) & (earlier >= first)
    behind = tl.load(drafter + passes - 1 - back, mask=back < passes, other=END)
    behind = tl.where(back < passes, behind, tl.load(response + earlier, mask=is_earlier, other=END).to(tl.int64))
    found, kind = _by_last(*searched, behind, owner, first_kind, none)
    worth = tl.where(candidate < CANDIDATES - 1, tl.load(worth + kind), float("-inf"))
    place = tl.sum(tl.where(candidate == tl.argmax(worth, 0), found, 0))
    return tl.where((passes > 0) & (draft_length > passes), place, none), tl.max(worth, 0)


@triton.jit
def _by_last(keys, places, count, steps, hashing, last_of_size, last, owner, first_kind, none):
    """For each owner of text, the place of the longest match of the last tokens, and its kind of draft."""
    back, size = tl.arange(0, LONGEST), tl.arange(0, SIZES)
    within = back[None, :] <= tl.load(last_of_size + size)[:, None]
    sums = tl.sum(tl.where(within, (last * tl.load(hashing + back))[None, :], 0), 1)
    salts = sums + tl.load(hashing + LONGEST + 1 + size)
    wanted = _mixed(salts[None, :] + (owner * tl.load(hashing + LONGEST))[:, None])
    at = _search(keys, count, steps, wanted)
    best = tl.min(tl.where(tl.load(keys + at) == wanted, size[None, :], SIZES), 1)
    found = tl.sum(tl.where(size[None, :] == best[:, None], tl.load(places + at), 0), 1)
    return tl.where(best < SIZES, found, none), tl.where(best < SIZES, first_kind + best, NOTHING)


@triton.jit
def _mixed(keys):
    return (keys ^ (keys >> 29)) >> 1


@triton.jit
def _search(keys, count, steps, wanted):
    """The index of the first of the ascending `keys` that is not less than `wanted`; the last key never is."""
    low = wanted * 0
    high = low + (count - 1)
    for _ in range(steps):
        middle = (low + high) >> 1
        is_less = tl.load(keys + middle) < wanted
        low = tl.where(is_less, middle + 1, low)
        high = tl.where(is_less, high, middle)
    return low
