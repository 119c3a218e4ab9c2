"""`gumbel.pick` and `verification.verify` in Triton, for GPUs: the same tokens, without waiting for the device.

A first kernel sums the weights of every block of the vocabulary, and finds the largest logit of each group of tokens.
Another picks a token for each row among the groups that can contain it. Rows with top-k or top-p pass through a third
kernel in between, which finds the least logit kept by bisection over its bits. No block size is tuned and sums of
weights are exact, so that the token of a row does not depend on its batch.
Multiplications and additions must not be fused (`OPTIONS`): that would round differently from `gumbel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specrl.rollout.sampling import gumbel
from specrl.rollout.sampling.gumbel import MAX_VOCAB, Picked
from specrl.rollout.sampling.verification import Verified

OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
WHOLE_ROW = {**OPTIONS, "num_warps": 16}
"""The options of kernels whose programs work on a whole row."""
WIDTH = tl.constexpr(4096)
"""The number of logits that the search for the least logit reads at once."""
BLOCK = tl.constexpr(gumbel.BLOCK)
GROUP = tl.constexpr(gumbel.GROUP)
PER_BLOCK = tl.constexpr(gumbel.BLOCK // gumbel.GROUP)
GROUP_BITS = tl.constexpr(gumbel.GROUP_BITS)
OF_TOKENS, OF_GROUPS = tl.constexpr(gumbel.OF_TOKENS), tl.constexpr(gumbel.OF_GROUPS)
SLACK = tl.constexpr(gumbel.SLACK)
COLUMNS = tl.constexpr(8)
"""The groups that are looked at together: the likeliest of each column, where groups lie row by row."""
UNIT = tl.constexpr(gumbel.UNIT)
LOWEST = tl.constexpr(gumbel.LOWEST)
ROUNDER = tl.constexpr(gumbel.ROUNDER)
LOG2_E = tl.constexpr(gumbel.LOG2_E)
LN_2 = tl.constexpr(0.6931471805599453)
POWER_0, POWER_1, POWER_2, POWER_3, POWER_4, POWER_5, POWER_6 = (
    tl.constexpr(coefficient * gumbel.UNIT) for coefficient in gumbel.POWER
)
LOG_0, LOG_1, LOG_2, LOG_3, LOG_4, LOG_5, LOG_6, LOG_7, LOG_8 = map(tl.constexpr, gumbel.LOGARITHM)
HALF_ROOT_BITS = tl.constexpr(gumbel.HALF_ROOT_BITS)
WORDS = tl.constexpr(gumbel.WORDS)
MOST = tl.constexpr(1 - 2.0**-24)
LEAST_KEY = tl.constexpr(-(2**31))
ALL_BUT_SIGN = tl.constexpr(2**31 - 1)


def pick(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor) -> Picked:
    """Pick tokens as `gumbel.pick` does; rows of `logits`, FP32 or BF16, are contiguous."""
    rows, vocab = logits.shape
    assert vocab <= MAX_VOCAB and logits.stride(1) == 1, (logits.shape, logits.stride())
    num_blocks = triton.cdiv(vocab, gumbel.BLOCK)
    all_blocks = triton.next_power_of_2(num_blocks)
    sums = logits.new_empty(rows, num_blocks, dtype=torch.float64)
    references = logits.new_empty(rows, num_blocks, dtype=torch.float32)
    maxima = logits.new_empty(rows, num_blocks, gumbel.BLOCK // gumbel.GROUP, dtype=torch.float32)
    whole = logits.new_empty(rows, dtype=torch.float64)
    thresholds = logits.new_empty(rows, dtype=torch.int32)
    picked = Picked(
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty(rows, dtype=torch.float32),
        logits.new_empty(rows, dtype=torch.float32),
    )
    if not rows:
        return picked
    row_of = logits, logits.stride(0), vocab, temperature
    of_parts = sums, references, maxima, num_blocks
    bits = 16 if logits.dtype is torch.bfloat16 else 32
    sum_blocks[rows, num_blocks](*row_of, *of_parts, **OPTIONS)
    keep_most_probable[(rows,)](*row_of, top_k, top_p, whole, thresholds, *of_parts, all_blocks, bits, **WHOLE_ROW)
    found = seeds, positions, whole, thresholds, *of_parts, *picked
    pick_tokens[(rows,)](*row_of, *found, all_blocks, bits, **WHOLE_ROW)
    return picked


def verify(picked: Tensor, drafts: Tensor, starts: Tensor, stop_tokens: Tensor, limits: Tensor, width: int) -> Verified:
    """Verify the drafts of a batch as `verification.verify` does."""
    requests = len(limits)
    found = Verified(picked.new_empty(requests, width), picked.new_empty(requests, dtype=torch.int32))
    if requests:
        num_stops = len(stop_tokens)
        shape = width, triton.next_power_of_2(width), num_stops, triton.next_power_of_2(max(num_stops, 1))
        accept[(requests,)](picked, drafts, starts, stop_tokens, limits, *found, *shape, num_warps=1)
    return found


@triton.jit
def accept(
    picked,
    drafts,
    starts,
    stop_tokens,
    limits,
    tokens,
    counts,
    width,
    all_columns: tl.constexpr,
    num_stops,
    all_stops: tl.constexpr,
):
    """Write the tokens that a request gets."""
    request = tl.program_id(0)
    first = tl.load(starts + request)
    count = tl.load(starts + request + 1) - first
    column, stop = tl.arange(0, all_columns), tl.arange(0, all_stops)
    token = tl.load(picked + first + column, mask=column < count, other=-1)
    draft = tl.load(drafts + first + column + 1, mask=column + 1 < count, other=-1)
    stops = tl.load(stop_tokens + stop, mask=stop < num_stops, other=-1)
    is_stop = tl.max((token[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    goes_on = (column + 1 < count) & (draft == token) & ~is_stop
    found = tl.minimum(tl.min(tl.where(goes_on, all_columns, column)) + 1, tl.load(limits + request)).to(tl.int32)
    tl.store(tokens + request * width + column, tl.where(column < found, token, -1), mask=column < width)
    tl.store(counts + request, found)


@triton.jit
def sum_blocks(logits, stride, vocab, temperature, sums, references, maxima, num_blocks):
    """Write, for one block of a row, the sum of the weights, the largest logit (NaN if any is NaN or +inf), and the
    largest logit of each group."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = _load(logits + row * stride, block * BLOCK + tl.arange(0, BLOCK), vocab)
    largest = tl.max(x)
    is_finite = tl.min((x < float("inf")).to(tl.int32)) == 1  # false for NaN too
    distance = (x - _bounded(largest)) * _scale(tl.load(temperature + row))
    at = row * num_blocks + block
    tl.store(sums + at, tl.sum(tl.floor(_powers(distance)).to(tl.float64)))
    tl.store(references + at, tl.where(is_finite, largest, float("nan")))
    tl.store(maxima + at * PER_BLOCK + tl.arange(0, PER_BLOCK), _of_groups(x))


@triton.jit
def keep_most_probable(
    logits,
    stride,
    vocab,
    temperature,
    top_k,
    top_p,
    whole,
    thresholds,
    sums,
    references,
    maxima,
    num_blocks,
    all_blocks: tl.constexpr,
    bits: tl.constexpr,
):
    """For a row with top-k or top-p, reduce the sums, made relative to the row's largest logit, and the groups' largest
    logits to the kept tokens, and write the least key kept; write the sum of all weights to `whole`, or 0 for other
    rows."""
    row = tl.program_id(0).to(tl.int64)
    t, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    has_top_k = (k > 0) & (k < vocab)
    threshold = tl.full((), LEAST_KEY, tl.int64) >> (32 - bits)
    if (t == 0) | ((not has_top_k) & (p >= 1)):
        tl.store(whole + row, 0.0)
        tl.store(thresholds + row, threshold.to(tl.int32))
        return
    logits += row * stride
    scale = _scale(t)
    of_blocks = tl.arange(0, all_blocks)
    largest = tl.load(references + row * num_blocks + of_blocks, mask=of_blocks < num_blocks, other=float("-inf"))
    largest = _bounded(tl.max(largest))
    if has_top_k:
        for bit in range(bits):
            candidate = threshold + (tl.full((), 1, tl.int64) << (bits - 1 - bit))
            counts = tl.full((WIDTH,), 0, tl.int32)
            for start in range(0, vocab, WIDTH):
                token = start + tl.arange(0, WIDTH)
                key = _key(_load(logits, token, vocab), bits)
                counts += ((key >= candidate) & (token < vocab)).to(tl.int32)
            threshold = tl.where(tl.sum(counts) >= k, candidate, threshold)
    if p < 1:
        kept = threshold
        target = _mass(logits, vocab, largest, scale, kept, bits) * p.to(tl.float64)
        threshold = tl.full((), LEAST_KEY, tl.int64) >> (32 - bits)
        for bit in range(bits):
            candidate = threshold + (tl.full((), 1, tl.int64) << (bits - 1 - bit))
            mass = _mass(logits, vocab, largest, scale, tl.maximum(candidate, kept), bits)
            threshold = tl.where(mass >= target, candidate, threshold)
    total = tl.full((), 0.0, tl.float64)
    for block in range(num_blocks):
        x = _load(logits, block * BLOCK + tl.arange(0, BLOCK), vocab)
        w, is_kept = _weights(x, largest, scale).to(tl.float64), _key(x, bits) >= threshold
        total += tl.sum(w)
        at = row * num_blocks + block
        tl.store(sums + at, tl.sum(tl.where(is_kept, w, 0.0)))
        tl.store(maxima + at * PER_BLOCK + tl.arange(0, PER_BLOCK), _of_groups(tl.where(is_kept, x, float("-inf"))))
    tl.store(whole + row, total)
    tl.store(thresholds + row, threshold.to(tl.int32))


@triton.jit
def pick_tokens(
    logits,
    stride,
    vocab,
    temperature,
    seeds,
    positions,
    whole,
    thresholds,
    sums,
    references,
    maxima,
    num_blocks,
    tokens,
    logprobs,
    log_kept_mass,
    all_blocks: tl.constexpr,
    bits: tl.constexpr,
):
    """Write a row's entries of `Picked`."""
    row = tl.program_id(0).to(tl.int64)
    t, all_mass = tl.load(temperature + row), tl.load(whole + row)
    scale, is_greedy, is_limited = _scale(t), t == 0, all_mass > 0
    block = tl.arange(0, all_blocks)
    in_row, at = block < num_blocks, row * num_blocks + block
    of_blocks = tl.load(references + at, mask=in_row, other=float("-inf"))
    largest = tl.max(of_blocks)
    finite = (tl.min((of_blocks < float("inf")).to(tl.int32)) == 1) & (largest > float("-inf"))

    behind = tl.minimum(_bounded(of_blocks) - _bounded(largest), 0.0) * scale  # a block of -inf counts as at 0
    factor = tl.where(is_limited, 1.0, (_powers(behind) / UNIT).to(tl.float64))
    total = tl.sum(tl.floor(tl.load(sums + at, mask=in_row, other=0.0) * factor))
    maxima += row * num_blocks * PER_BLOCK
    drawn_for = tl.load(seeds + row), tl.load(positions + row), is_greedy
    settings = vocab, largest, scale, tl.load(thresholds + row)
    token = _winner(logits + row * stride, maxima, num_blocks * PER_BLOCK, settings, drawn_for, all_blocks, bits)
    token = tl.where(finite, token, 0)

    exponent = ((tl.load(logits + row * stride + token).to(tl.float32) - largest) * scale).to(tl.float64)
    logprob = tl.where(is_greedy, 0.0, (exponent - tl.log2(total / UNIT)) * LN_2)
    kept = tl.where(is_limited & (not is_greedy), tl.log(total / tl.where(is_limited, all_mass, 1.0)), 0.0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(finite, logprob, float("nan")).to(tl.float32))
    tl.store(log_kept_mass + row, tl.where(finite, kept, 0.0).to(tl.float32))


@triton.jit
def _winner(logits, maxima, num_groups, settings, drawn_for, all_blocks: tl.constexpr, bits: tl.constexpr):
    """The token of a row with the largest sum of scaled logit and noise, or the largest logit if greedy."""
    vocab, largest, scale, threshold = settings
    seed, position, is_greedy = drawn_for
    line, column = tl.arange(0, all_blocks * PER_BLOCK // COLUMNS), tl.arange(0, COLUMNS)
    number = line[:, None] * COLUMNS + column
    highest = tl.load(maxima + number, mask=number < num_groups, other=float("-inf"))
    counters = tl.arange(0, all_blocks * PER_BLOCK // WORDS)
    drawn = tl.reshape(
        _joined(_words(seed, position, counters, OF_GROUPS)), (all_blocks * PER_BLOCK // COLUMNS, COLUMNS)
    )
    bounds = (highest - largest) * scale - tl.where(is_greedy, 0.0, _log2(_least(drawn)))
    bounds = tl.where(highest > float("-inf"), bounds, float("-inf"))
    best, token = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    ahead = tl.max(bounds, 0)
    while (tl.max(ahead) > float("-inf")) & (tl.max(ahead) >= best - SLACK):
        likeliest = tl.argmax(bounds, 0)
        group = likeliest * COLUMNS + column
        member = group[:, None] * GROUP + tl.arange(0, GROUP)
        x = _load(logits, member, vocab)
        race = (x - largest) * scale + tl.where(is_greedy, 0.0, _noise(seed, position, group))
        is_kept = (_key(x, bits) >= threshold) & (ahead > float("-inf"))[:, None]
        race = tl.where(is_kept, race, float("-inf"))
        leading = tl.max(race)
        first = tl.min(tl.where(race == leading, member, vocab))
        token = tl.where((leading > best) | ((leading == best) & (first < token)), first, token)
        best = tl.maximum(best, leading)
        bounds = tl.where(line[:, None] == likeliest[None, :], float("-inf"), bounds)
        ahead = tl.max(bounds, 0)
    return token


@triton.jit
def _of_groups(x):
    return tl.max(tl.reshape(x, (PER_BLOCK, GROUP)), 1)


@triton.jit
def _noise(seed, position, group):
    """The noise of the tokens of groups, [*group, GROUP], as in `gumbel.noise`."""
    first, second, third, fourth = _words(seed, position, group // WORDS, OF_GROUPS)
    place = group % WORDS
    drawn = tl.where(place < 2, tl.where(place == 0, first, second), tl.where(place == 2, third, fourth))
    counters = group[:, None] * (GROUP // WORDS) + tl.arange(0, GROUP // WORDS)
    words = tl.reshape(_joined(_words(seed, position, counters, OF_TOKENS)), (group.shape[0], GROUP))
    is_winner = tl.arange(0, GROUP)[None, :] == (drawn & (GROUP - 1)).to(tl.int32)[:, None]
    more = tl.where(is_winner, 0.0, _exponential(words, 32))
    return -_log2(more + _least(drawn)[:, None])


@triton.jit
def _least(drawn):
    """The least exponential variable of each group, given the words drawn for them."""
    return _exponential(drawn >> GROUP_BITS, 32 - GROUP_BITS) * (1 / GROUP)


@triton.jit
def _words(seed, position, counters, kind: tl.constexpr):
    counters = counters.to(tl.uint32)
    zero = counters * 0
    return tl.philox(seed, zero + position.to(tl.uint32), counters, zero + kind, zero)


@triton.jit
def _joined(words):
    first, second, third, fourth = words
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _exponential(words, bits: tl.constexpr):
    small = tl.minimum(words.to(tl.float32) * (0.5**bits) + 0.5 ** (bits + 1), MOST)
    rest = 1 - small
    lost = (1 - rest) - small
    return -(_log2(rest) + lost * LOG2_E)


@triton.jit
def _log2(value):
    bits = value.to(tl.int32, bitcast=True)
    exponent = (bits - HALF_ROOT_BITS) >> 23
    rest = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1
    result = rest * LOG_8
    result = (result + LOG_7) * rest
    result = (result + LOG_6) * rest
    result = (result + LOG_5) * rest
    result = (result + LOG_4) * rest
    result = (result + LOG_3) * rest
    result = (result + LOG_2) * rest
    result = (result + LOG_1) * rest
    return (result + LOG_0) * rest + exponent.to(tl.float32)


@triton.jit
def _load(logits, token, vocab):
    return tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _scale(temperature):
    return tl.div_rn(tl.full((), LOG2_E, tl.float32), tl.where(temperature == 0, 1.0, temperature))


@triton.jit
def _bounded(reference):
    return tl.where(reference == float("-inf"), 0.0, reference)


@triton.jit
def _weights(x, reference, scale):
    return tl.floor(_powers((x - reference) * scale))


@triton.jit
def _powers(exponent):
    exponent = tl.maximum(exponent, LOWEST)
    rounded = exponent + ROUNDER
    x = exponent - (rounded - ROUNDER)
    power = x * POWER_6
    power = (power + POWER_5) * x
    power = (power + POWER_4) * x
    power = (power + POWER_3) * x
    power = (power + POWER_2) * x
    power = (power + POWER_1) * x
    power = power + POWER_0
    bits = power.to(tl.int32, bitcast=True) + (rounded.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mass(logits, vocab, largest, scale, threshold, bits: tl.constexpr):
    """The sum of the weights of the logits whose key is at least `threshold`."""
    mass = tl.full((WIDTH,), 0.0, tl.float64)  # reduced once at the end, because a reduction synchronises threads
    for start in range(0, vocab, WIDTH):
        x = _load(logits, start + tl.arange(0, WIDTH), vocab)
        w = _weights(x, largest, scale).to(tl.float64)
        mass += tl.where(_key(x, bits) >= threshold, w, 0.0)
    return tl.sum(mass)


@triton.jit
def _key(x, bits: tl.constexpr):
    """An integer of `bits` bits in the order of x; the low bits of BF16 carry no information."""
    key = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 and 0 are the same
    return (key ^ ((key >> 31) & ALL_BUT_SIGN)) >> (32 - bits)
