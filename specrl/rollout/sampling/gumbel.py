"""Drafter-invariant sampling: the token at (seed, position) depends on the policy's distribution alone.

The picked token has the largest sum of scaled logit and Gumbel noise g(seed, position, token), drafted or not: it
follows the policy's distribution (the Gumbel-max trick), and a draft is accepted when it is that token (Daliri, Musco,
Suresh: "Coupling without communication and drafter-invariant speculative decoding", 2024). Two policies that differ
little, or two roundings of one, seldom pick different tokens: the probability is at most 2 TV / (1 + TV), where TV is
their total variation distance, however many tokens are likely.

Few tokens need their noise. Gumbel noise is minus the logarithm of an exponential variable, and the least of a group of
such variables is exponential too, as is the excess of each other one over it. So the noise of a group's tokens consists
of the group's draws, namely the least value and its token, and of the excess of each other token. The group's draws
bound the noise of its tokens, and most groups of a row cannot win.

The token picked from a row of logits is defined to the bit, so that neither batch nor device can change it. Logits are
in bits, times log2(e) / temperature, as distances from the row's largest one. Every step is an FP32 multiplication or
addition with its own rounding, and of tokens with equal sums the first wins. `kernels` computes the same in Triton.

The sums that log-probs, top-k and top-p need are exact: a token's weight is 2 to the power of its distance, an integer
in steps of 2^-35, and FP64 represents their sums exactly. Distances are from the largest logit of a block; sums are
rescaled to the row's largest logit and rounded down block by block. With top-k or top-p, distances are from the row's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
LOW_32 = 0xFFFFFFFF
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""The number of logits worked on at once: 1 MiB in FP32 on a CPU, 256 MiB on a GPU."""

BLOCK = 1024
"""The tokens in a block. Another number would be another definition: log-probs are rounded block by block."""
GROUP = 32
"""The tokens of a group. Another number would be another definition: they share a random number."""
GROUP_BITS = 5
LIKELY = 12
"""The groups of a row that are looked at first."""
SLACK = 2.0**-10
"""How far a computed bound on a group may be too low, in bits: logarithms are rounded, by 2^-17 at most."""
UNIT = 2.0**35
"""The weight of a block's most probable token."""
MAX_VOCAB = 2**18
"""The largest vocabulary. Sums of as many weights are below 2^53, up to which FP64 holds every integer."""
LOG2_E = math.log2(math.e)
LOWEST = -64.0
"""The exponent from which on all weights are 0."""
POWER = (
    1.0,
    0.6931471824645996,
    0.24022646248340607,
    0.05550328642129898,
    0.009618489071726799,
    0.0013399930903688073,
    0.0001534581242594868,
)
"""The coefficients, exact in FP32, of a polynomial for 2^x from -1/2 to 1/2, lowest first; its error is 1e-7."""
ROUNDER = 1.5 * 2.0**23
"""FP32 numbers of this size have no fraction: adding it rounds to an integer, which the low bits then hold."""
WORDS = 4
"""The random words of a Philox counter, each for a group or a token."""
OF_TOKENS, OF_GROUPS = 0, 1
"""What a counter is for."""
HALF_ROOT_BITS = 0x3F3504F3
"""The bits of sqrt(1/2) in FP32."""
LOGARITHM = (
    1.4426950216293335,
    -0.7213473320007324,
    0.48091062903404236,
    -0.3607036769390106,
    0.2879162132740021,
    -0.23894518613815308,
    0.21571628749370575,
    -0.20726746320724487,
    0.12583234906196594,
)
"""The coefficients, exact in FP32, of a polynomial for log2(1 + x) / x, lowest first, where 1 + x is from sqrt(1/2) to
sqrt(2); its relative error is 5e-8."""


class Picked(NamedTuple):
    """The picked tokens, one for each row of logits, and their probabilities."""

    tokens: Tensor
    """[rows] int64."""
    logprobs: Tensor
    """[rows] FP32, in nats, under the distribution that was sampled from; 0 where greedy. NaN where a logit is NaN or
    +inf, or all are -inf: the row's token, 0, then means nothing."""
    log_kept_mass: Tensor
    """[rows] FP32, in nats: the logarithm of the probability of all tokens that top-k and top-p keep. Added to
    `logprobs`, it gives those under the whole distribution at the row's temperature. 0 where greedy, and exactly 0
    where nothing is dropped by rule."""


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Compute Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) on int64 tensors.

    The words of counter and key are in [0, 2^32), in tensors of one shape, and so are the four results.
    """
    even, odd, keys = (torch.stack(pair) for pair in (counter[::2], counter[1::2], key))
    multipliers, weyl = (
        torch.tensor(pair, device=even.device).view(2, *[1] * (even.dim() - 1))
        for pair in (PHILOX_MULTIPLIERS, PHILOX_WEYL)
    )
    for _ in range(PHILOX_ROUNDS):
        products = (even * multipliers).flip(0)
        # A product of two words may overflow into the sign bit: masking after the shift removes the sign's copies.
        even = (products >> 32).bitwise_and_(LOW_32).bitwise_xor_(odd).bitwise_xor_(keys)
        odd = products.bitwise_and_(LOW_32)
        keys = (keys + weyl).bitwise_and_(LOW_32)
    return even[0], odd[0], even[1], odd[1]


def noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """g(seed, position, token) of every token, FP32 [rows, vocab], in bits and with the same bits on every device.

    The key is the seed. Counters (position, group // 4, 1, 0) give a word for each of four groups: its low 5 bits name
    the token with the least variable, which is -log2(1 - v) / 32 with v in (0, 1) from the other bits. Counters
    (position, token // 4, 0, 0) give a word for each of four tokens: its excess is -log2(1 - v). g is -log2 of the sum.

    Args:
        seeds: [rows] int64, in [0, 2^63).
        positions: [rows] int64, in the sequence, prompt included.
    """
    counters = torch.arange(-(-vocab // (GROUP * WORDS)), device=seeds.device)
    drawn = _words(seeds[:, None], positions[:, None], counters, OF_GROUPS)
    rows = torch.arange(len(seeds), device=seeds.device).repeat_interleave(drawn.shape[1])[:, None]
    groups = torch.arange(drawn.shape[1], device=seeds.device).repeat(len(seeds))
    return _noise(seeds[rows], positions[rows], groups, drawn.flatten()).view(len(seeds), -1)[:, :vocab]


def pick(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor) -> Picked:
    """Pick one token per row; all tensors are on one device.

    Args:
        logits: [rows, vocab], any floating type; at most `MAX_VOCAB` tokens.
        temperature: [rows] FP32; 0 is greedy.
        top_k: [rows] int64; 0 is all tokens.
        top_p: [rows] FP32; 1 is all tokens.
        seeds: [rows] int64, in [0, 2^63).
        positions: [rows] int64, those that the tokens will have in the sequence, prompt included.
    """
    assert logits.shape[1] <= MAX_VOCAB, logits.shape
    scales = _scales(temperature)
    sums, references = _block_sums(logits, scales)
    largest = references.amax(-1, keepdim=True)  # [rows, 1], NaN if any logit is
    behind = (_bounded(references) - _bounded(largest)).clamp_(max=0)  # a block of -inf counts as at 0
    sums.mul_(_powers(behind * scales).div_(UNIT).double()).floor_()
    least, whole = torch.full_like(largest, -torch.inf), sums
    is_finite, greedy = largest[:, 0].isfinite(), temperature == 0
    limited = is_finite & ~greedy & is_limited(top_k, top_p, logits.shape[1])
    if limited.any():
        rows = limited.nonzero()[:, 0]
        whole = sums.clone()
        settings = largest[rows], scales[rows], top_k[rows], top_p[rows]
        sums[rows], whole[rows], least[rows] = _kept_sums(logits[rows], *settings)
    tokens = logits.argmax(-1, keepdim=True)
    if not greedy.all():
        rows = (~greedy).nonzero()[:, 0]
        of_rows = logits, scales, largest, least, seeds, positions
        tokens[rows, 0] = _race(*(of[rows] for of in of_rows))
    totals = sums.sum(-1)
    exponents = (logits.gather(1, tokens) - largest).float() * scales
    logprobs = (exponents[:, 0].double() - (totals / UNIT).log2()) * math.log(2)
    log_kept_mass = (totals / whole.sum(-1)).log()
    return Picked(
        tokens[:, 0].masked_fill_(~is_finite, 0),
        logprobs.masked_fill_(greedy, 0).masked_fill_(~is_finite, torch.nan).float(),
        log_kept_mass.masked_fill_(greedy | ~is_finite, 0).float(),
    )


def weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The probabilities with which `pick` picks, [rows, vocab] FP32, scaled so that the largest of a row is 1.

    Greedy rows are at temperature 1. Top-k is applied first, then top-p to the remaining tokens; both keep ties with
    the last token kept.
    """
    wide = logits.float()
    found = _weights(wide - _bounded(wide.amax(-1, keepdim=True)), _scales(temperature))
    return found.masked_fill_(wide < least_kept(wide, found, top_k, top_p)[:, None], 0).div_(UNIT)


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probs of given tokens at temperature 1, FP32 [rows].

    Args:
        logits: [rows, vocab], any floating type.
        tokens: [rows] int64.
    """
    parts = [logits[part].float().log_softmax(-1).gather(1, tokens[part, None]) for part in _chunks(logits)]
    return torch.cat(parts)[:, 0]


def _block_sums(logits: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    # The sums of the weights of each block, FP64 [rows, blocks], and the logits whose weight there is `UNIT`.
    rows, vocab = logits.shape
    num_blocks = -(-vocab // BLOCK)
    sums = torch.empty(rows, num_blocks, dtype=torch.float64, device=logits.device)
    references = torch.empty(rows, num_blocks, device=logits.device)
    for part in _chunks(logits):
        split = _split(logits[part])
        references[part] = split.amax(-1)
        distances = split.float() - _bounded(references[part])[:, :, None]
        sums[part] = _weights(distances, scales[part, :, None]).sum(-1, dtype=torch.float64)
    return sums, references


def _kept_sums(
    logits: Tensor, largest: Tensor, scales: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # Sums by block, FP64 [rows, blocks], of the tokens kept by top-k and top-p and of all, and the least logit kept.
    wide = logits.float()
    found = _weights(wide - _bounded(largest), scales)
    whole = _split(found, filling=0.0).sum(-1, dtype=torch.float64)
    least = least_kept(wide, found, top_k, top_p)[:, None]
    kept = _split(found.masked_fill_(wide < least, 0), filling=0.0).sum(-1, dtype=torch.float64)
    return kept, whole, least


def _race(logits: Tensor, scales: Tensor, largest: Tensor, least: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    # The tokens [rows] with the largest sum of scaled logit and noise.
    of_rows = logits, scales, _bounded(largest), least, seeds[:, None], positions[:, None]
    return torch.cat([_winners(*(of[part] for of in of_rows)) for part in _chunks(logits)])


def _winners(
    logits: Tensor, scales: Tensor, largest: Tensor, least: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    grouped = _split(logits.float().masked_fill(logits < least, -torch.inf), GROUP)
    count, groups = grouped.shape[:2]
    drawn = _words(seeds, positions, torch.arange(-(-groups // WORDS), device=seeds.device), OF_GROUPS)[:, :groups]
    bounds = (grouped.amax(-1) - largest) * scales - _log2(_least(drawn)[0])
    last = torch.full_like(seeds[:, 0], logits.shape[1] - 1)
    best, tokens = torch.full_like(bounds[:, 0], -torch.inf), last
    # A few groups first, and more only if these do not decide, which is rare with a policy's logits.
    numbers = bounds.topk(min(LIKELY, groups)).indices.flatten()
    rows = torch.arange(count, device=seeds.device).repeat_interleave(len(numbers) // count)
    while len(rows):
        distances = (grouped[rows, numbers] - largest[rows]) * scales[rows]
        leaders = distances.add_(_noise(seeds[rows], positions[rows], numbers, drawn[rows, numbers])).max(-1)
        ahead = best.scatter_reduce(0, rows, leaders.values, "amax")
        found = torch.where(leaders.values == ahead[rows], numbers * GROUP + leaders.indices, last[rows])
        tokens = torch.where(ahead > best, last, tokens).scatter_reduce_(0, rows, found, "amin")
        best, bounds[rows, numbers] = ahead, torch.nan
        rows, numbers = (bounds >= best[:, None] - SLACK).nonzero(as_tuple=True)
    return tokens


def _noise(seeds: Tensor, positions: Tensor, groups: Tensor, drawn: Tensor) -> Tensor:
    # The noise of the tokens of groups [n], for which these words were drawn, [n, GROUP]; the others are [n, 1].
    counters = groups[:, None] * (GROUP // WORDS) + torch.arange(GROUP // WORDS, device=groups.device)
    more, (least, winners) = _exponential(_words(seeds, positions, counters, OF_TOKENS), 32), _least(drawn[:, None])
    more.masked_fill_(torch.arange(GROUP, device=groups.device) == winners, 0)
    return _log2(more.add_(least)).neg_()


def _least(drawn: Tensor) -> tuple[Tensor, Tensor]:
    # The least exponential variable of groups, and which of its tokens has it.
    return _exponential(drawn >> GROUP_BITS, 32 - GROUP_BITS).div_(GROUP), drawn & (GROUP - 1)


def _words(seeds: Tensor, positions: Tensor, counters: Tensor, kind: int) -> Tensor:
    # The words of counters, [rows, WORDS times as many]; seeds and positions are [rows, 1].
    zero = torch.zeros_like(seeds + counters)
    counter = zero + (positions & LOW_32), zero + counters, zero + kind, zero
    key = zero + (seeds & LOW_32), zero + (seeds >> 32 & LOW_32)
    return torch.stack(philox(counter, key), -1).flatten(-2)


def _exponential(words: Tensor, bits: int) -> Tensor:
    # -log2(1 - v), where v = (word + 1/2) / 2^bits: exponentially distributed, with a mean of 1 / ln 2.
    small = words.float().mul_(2.0**-bits).add_(2.0 ** -(bits + 1)).clamp_(max=1 - 2.0**-24)
    rest = 1 - small
    lost = (1 - rest).sub_(small)  # in rounding `rest`: it is all that there is of 1 - v where v is small
    return _log2(rest).add_(lost.mul_(LOG2_E)).neg_()


def _weights(distances: Tensor, scales: Tensor) -> Tensor:
    return _powers(distances.mul_(scales)).floor_()


def _powers(exponents: Tensor) -> Tensor:
    exponents.clamp_(min=LOWEST)
    rounded = exponents + ROUNDER
    exponents.sub_(rounded - ROUNDER)
    result = exponents * (POWER[-1] * UNIT)
    for coefficient in reversed(POWER[1:-1]):
        result.add_(coefficient * UNIT).mul_(exponents)
    result.add_(POWER[0] * UNIT)
    result.view(torch.int32).add_(rounded.view(torch.int32).bitwise_left_shift_(23))  # to the bits of the exponent
    return result


def _log2(values: Tensor) -> Tensor:
    # The logarithm of positive numbers, to base 2, with a relative error of 1e-7 around 1, too.
    bits = values.view(torch.int32)
    exponents = (bits - HALF_ROOT_BITS) >> 23
    rest = (bits - (exponents << 23)).view(torch.float32) - 1
    result = rest * LOGARITHM[-1]
    for coefficient in reversed(LOGARITHM[1:-1]):
        result.add_(coefficient).mul_(rest)
    return result.add_(LOGARITHM[0]).mul_(rest).add_(exponents.float())


def _bounded(references: Tensor) -> Tensor:
    return references.masked_fill(references == -torch.inf, 0)


def _scales(temperature: Tensor) -> Tensor:
    divisors = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    return (torch.full_like(divisors, LOG2_E) / divisors)[:, None]


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows, vocab = logits.shape
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // vocab)
    return (slice(start, start + size) for start in range(0, rows, size))


def _split(values: Tensor, size: int = BLOCK, filling: float = -torch.inf) -> Tensor:
    rest = -values.shape[1] % size
    whole = torch.nn.functional.pad(values, (0, rest), value=filling) if rest else values
    return whole.view(len(values), -1, size)


def is_limited(top_k: Tensor, top_p: Tensor, vocab: int) -> Tensor:
    """Whether top-k or top-p may drop a token of each row, bool [rows]."""
    return (top_k > 0) & (top_k < vocab) | (top_p < 1)


def least_kept(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least logit that is kept, FP32 [rows]: -inf without top-k and top-p.

    Args:
        logits: [rows, vocab] FP32.
        weights: [rows, vocab] FP32, proportional to the probabilities; integers, so that sums of them are exact.
        top_k: [rows] int64; 0 is all tokens.
        top_p: [rows] FP32; 1 is all tokens.
    """
    highest, tokens = logits.sort(descending=True)
    cumulative = weights.gather(1, tokens).cumsum(-1, dtype=torch.float64)
    vocab, k, p = logits.shape[1], top_k[:, None], top_p[:, None]
    last = highest.gather(1, torch.where((k > 0) & (k < vocab), k, vocab) - 1)  # [rows, 1], the k-th
    kept = (highest >= last).sum(-1, keepdim=True)
    inside = torch.searchsorted(cumulative, cumulative.gather(1, kept - 1) * p)  # the first token to reach its share
    nucleus = highest.gather(1, inside.clamp(max=vocab - 1))
    return torch.where(p < 1, nucleus, torch.where(kept < vocab, last, -torch.inf))[:, 0]
