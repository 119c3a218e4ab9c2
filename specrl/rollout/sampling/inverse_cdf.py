"""Drafter-invariant sampling: the token at (seed, position) depends on the policy's distribution alone.

One uniform u(seed, position) from a counter-based generator picks the token by inverse CDF over the policy's processed
probabilities, drafted or not; a draft is accepted when it is that token (Daliri, Musco, Suresh: "Coupling without
communication and drafter-invariant speculative decoding", 2024). Every operation works on one row or one value at a
time, so that a row's token does not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from specrl.rollout.sampling.nucleus import BLOCK, blocks, most_probable

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
LOW_32 = 0xFFFFFFFF
CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
"""The number of logits worked on at once: in FP32, 2 MiB on a CPU, which fit its caches, and 256 MiB on a GPU."""
COMMON_TOTAL = (1e-10, 1e30)
"""The range of sums of exp(logit) for which FP32 needs no shift by the largest logit. Within it the pass over the
vocabulary that finds the largest logit is saved."""

LOG2_E = math.log2(math.e)
"""Exponentials are powers of two of what is multiplied by this: on CPUs `exp2` takes a third of the time of `exp`."""
VECTORS, GRAIN = 32, 32768
"""On a CPU `exp2` computes this many values at once, and the rest of a thread's share one by one with other rounding;
a thread gets at least so many values."""

JUST_BELOW = 1 - 2.0**-52
"""The factor that makes an FP64 number smaller by one or two units in its last place."""


class Picked(NamedTuple):
    """The tokens that were picked, one for each row of logits, and their probabilities."""

    tokens: Tensor
    """[rows] int64."""
    logprobs: Tensor
    """[rows] FP32, in nats, under the distribution that was sampled from; 0 where greedy."""
    log_kept_mass: Tensor
    """[rows] FP32, in nats: the logarithm of the probability that the tokens kept by top-k and top-p have together
    before the others are dropped. Added to `logprobs`, it gives the log-probs under the whole distribution at the
    row's temperature. It is exactly 0 where nothing is dropped by rule, and 0 where greedy."""


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Compute Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) on int64 tensors.

    The words of counter and key are in [0, 2^32), and so are the four results. A product of two words may overflow
    int64 into the sign bit; its 64 bits stay right, and masking after the shift removes the copies of the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & LOW_32) ^ c1 ^ k0,
            product1 & LOW_32,
            ((product0 >> 32) & LOW_32) ^ c3 ^ k1,
            product0 & LOW_32,
        )
        k0, k1 = (k0 + PHILOX_WEYL[0]) & LOW_32, (k1 + PHILOX_WEYL[1]) & LOW_32
    return c0, c1, c2, c3


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return u(seed, position) in [0, 1), FP64, with the same bits on every device.

    The key is the low and the high word of the seed, the counter is (position, 0, 0, 0). The first two words of the
    result make 64 bits, low word first, of which the upper 53 become the uniform, as NumPy makes doubles.

    Args:
        seeds: int64, in [0, 2^63).
        positions: int64, the position of each token in its sequence, prompt included; it broadcasts against `seeds`.
    """
    zero = torch.zeros_like(positions)
    low, high, _, _ = philox((positions & LOW_32, zero, zero, zero), (seeds & LOW_32, (seeds >> 32) & LOW_32))
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def pick(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor) -> Picked:
    """Pick one token per row by inverse CDF at `u`.

    Args:
        logits: [rows, vocab], any floating type.
        temperature: [rows] FP32 on the CPU; 0 is greedy.
        top_k: [rows] int64 on the CPU; 0 is all tokens.
        top_p: [rows] FP32 on the CPU; 1 is all tokens.
        u: [rows] FP64 in [0, 1), on the logits' device.

    Returns:
        The tokens and their log-probs, on the logits' device.
    """
    is_greedy = temperature.numpy() == 0
    zeros = torch.zeros(logits.shape[0], device=logits.device)
    if is_greedy.all():
        return Picked(most_likely(logits), zeros, zeros)
    (tokens, logprobs, masses), totals = _draw(logits, temperature, top_k, top_p, u, None)
    least, most = torch.aminmax(totals)  # both are NaN if any of them is
    if not (least.item() > COMMON_TOTAL[0] and most.item() < COMMON_TOTAL[1]):
        rows = ((totals > COMMON_TOTAL[0]) & (totals < COMMON_TOTAL[1])).logical_not_().nonzero()[:, 0]
        own = rows.to(temperature.device)
        settings = temperature[own], top_k[own], top_p[own]
        (tokens[rows], logprobs[rows], masses[rows]), _ = _draw(
            logits[rows], *settings, u[rows], _largest(logits[rows])
        )
    if is_greedy.any():
        greedy = torch.from_numpy(is_greedy).to(logits.device)
        tokens = torch.where(greedy, most_likely(logits), tokens)
        logprobs, masses = torch.where(greedy, zeros, logprobs), torch.where(greedy, zeros, masses)
    return Picked(tokens, logprobs, masses)


def weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the probabilities that `pick` picks by, [rows, vocab] FP32, scaled so that the largest of a row is 1.

    Greedy rows are at temperature 1. Top-k comes first, then top-p of what top-k has left. Both keep every token that
    is at least as probable as the last one inside, ties included: the set depends on the row's values, not on the order
    of a sort. The arguments are those of `pick`.
    """
    scales = _scales(temperature, logits.device)
    found = _exponentials(logits, scales, _largest(logits)).clone()
    return most_probable(found, top_k, top_p)[0] if _are_limited(top_k, top_p) else found


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probs of given tokens at temperature 1, FP32 [rows].

    Args:
        logits: [rows, vocab], any floating type.
        tokens: [rows] int64.
    """
    rows, vocab = logits.shape
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // vocab)
    largest, totals = _largest(logits), torch.empty(rows, dtype=torch.float64, device=logits.device)
    for start in range(0, rows, size):
        part = slice(start, start + size)
        found = blocks(_exponentials(logits[part], LOG2_E, largest[part]))
        torch.sum(found.sum(-1), -1, dtype=torch.float64, out=totals[part])
    chosen = logits.gather(1, tokens[:, None]).float() - largest
    return (chosen[:, 0].double() - totals.log()).float()


def most_likely(logits: Tensor) -> Tensor:
    """Return the token [rows] int64 of each row's largest logit, the first one at a tie.

    On CPUs torch's own argmax over a vocabulary is not vectorised; this one is faster.
    """
    rows, vocab = logits.shape
    if vocab % BLOCK:
        return logits.argmax(-1)
    block = logits.view(rows, -1, BLOCK).amax(-1).argmax(-1, keepdim=True)
    return block[:, 0] * BLOCK + _block(logits, block).argmax(-1)


def _draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor, shift: Tensor | None
) -> tuple[Picked, Tensor]:
    """Return what was picked and, of the kept tokens, the sums of exp((logit - shift) / temperature) [rows] FP64.

    Greedy rows are sampled at temperature 1.

    Instead of a cumulative sum over the vocabulary there are two levels: first the block, then the token in it. Block
    sums are FP32 over 64 values (relative error below 2^-21), everything after them is FP64. No token of probability 0
    is picked. The exponentials of the block are computed a second time, because keeping all of them would be slower.
    """
    scales = _scales(temperature, logits.device)
    sums, whole, least = _block_sums(logits, scales, top_k, top_p, shift)
    across = sums.cumsum(-1, dtype=torch.float64)
    totals = across[:, -1]
    target = (u * totals)[:, None]
    block = _first_above(across, target)
    before = across.gather(-1, block) - sums.gather(-1, block)
    chosen = _exponentials(_block(logits, block), scales, shift)
    if whole is not sums:
        chosen = chosen.masked_fill_(chosen < least[:, None], 0)
    inside = (target - before).clamp_(min=0)  # rounding may put it below, where a token of probability 0 would do
    token = _first_above(chosen.cumsum(-1, dtype=torch.float64), inside)
    logprobs = (chosen.gather(-1, token)[:, 0] / totals).log().float()
    log_kept_mass = torch.zeros_like(logprobs)
    if whole is not sums:
        log_kept_mass = (totals / whole.cumsum(-1, dtype=torch.float64)[:, -1]).log().float()
    return Picked((block * BLOCK + token)[:, 0], logprobs, log_kept_mass), totals


def _block_sums(
    logits: Tensor, scales: Tensor | float, top_k: Tensor, top_p: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of the `_exponentials` that are kept, the sums of all of them, and the least one that is kept.

    Both sums are by block, FP32 [rows, blocks], and the same tensor if no row has top-k or top-p. The least is FP32
    [rows], and 0 where everything is kept. A row's sums do not depend on whether other rows are limited.
    """
    limited = (top_k > 0) | (top_p < 1)
    if not limited.any():
        sums = _sums(logits, scales, shift)
        return sums, sums, torch.zeros(len(logits), device=logits.device)
    if limited.all():
        return _limited_sums(logits, scales, top_k, top_p, shift)
    sums = torch.empty(len(logits), -(-logits.shape[1] // BLOCK), device=logits.device)
    whole, least = torch.empty_like(sums), torch.empty(len(logits), device=logits.device)
    for own in (limited, ~limited):
        rows = own.to(logits.device)
        scale = scales[rows] if isinstance(scales, Tensor) else scales
        by = shift[rows] if shift is not None else None
        sums[rows], whole[rows], least[rows] = _block_sums(logits[rows], scale, top_k[own], top_p[own], by)
    return sums, whole, least


def _sums(logits: Tensor, scales: Tensor | float, shift: Tensor | None) -> Tensor:
    """Return the sums of each block's `_exponentials`, FP32 [rows, blocks]."""
    rows, vocab = logits.shape
    sums = torch.empty(rows, -(-vocab // BLOCK), device=logits.device)
    for part, found in _by_chunks(logits, scales, shift):
        torch.sum(blocks(found), -1, out=sums[part])
    return sums


def _limited_sums(
    logits: Tensor, scales: Tensor | float, top_k: Tensor, top_p: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums over what top-k and top-p keep and over everything, [rows, blocks], and the least that is kept.

    The least exponential that is kept is FP32 [rows].
    """
    rows, vocab = logits.shape
    sums = torch.empty(rows, -(-vocab // BLOCK), device=logits.device)
    whole, least = torch.empty_like(sums), torch.zeros(rows, device=logits.device)
    for part, found in _by_chunks(logits, scales, shift):
        torch.sum(blocks(found), -1, out=whole[part])
        kept, least[part] = most_probable(found, top_k[part], top_p[part])
        torch.sum(blocks(kept), -1, out=sums[part])
    return sums, whole, least


def _by_chunks(logits: Tensor, scales: Tensor | float, shift: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield the `_exponentials` of a few rows at a time, with the place of these rows."""
    rows, vocab = logits.shape
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // vocab)
    for start in range(0, rows, size):
        part = slice(start, start + size)
        scale = scales[part] if isinstance(scales, Tensor) else scales
        yield part, _exponentials(logits[part], scale, shift[part] if shift is not None else None)


def _exponentials(logits: Tensor, scales: Tensor | float, shift: Tensor | None) -> Tensor:
    """Return 2 ** ((logits - shift) * scales), FP32, which later calls overwrite.

    The bits depend on the values alone and not on where they stand: no value is among those that a thread has left over
    (`VECTORS`), because numbers without meaning fill up the threads' shares.
    """
    size = logits.numel()
    memory = _workspace(logits.device, _even(size) if logits.device.type == "cpu" else size)
    scaled = memory[:size].view(logits.shape)
    scaled.copy_(logits)
    if shift is not None:
        scaled.sub_(shift)
    scaled.mul_(scales)
    memory.exp2_()
    return scaled


def _even(size: int) -> int:
    """Return how many values, at least `size`, CPU threads share so that each gets a multiple of `VECTORS`."""
    threads = 0
    while (found := min(torch.get_num_threads(), -(-size // GRAIN))) != threads:
        threads = found
        size += -size % (VECTORS * threads)
    return size


def _largest(logits: Tensor) -> Tensor:
    """Return the largest logit of each row, FP32 [rows, 1]."""
    return logits.amax(-1, keepdim=True).float()


def _scales(temperature: Tensor, device: torch.device) -> Tensor | float:
    """Return log2(e) / temperature, FP32 [rows, 1], a number if all are 1; greedy rows are taken to be at 1."""
    values = temperature.numpy()  # NumPy, here and below, avoids torch's overhead per operation
    if not ((values != 1) & (values != 0)).any():
        return LOG2_E
    return (LOG2_E / torch.where(temperature == 0, torch.ones_like(temperature), temperature)).to(device)[:, None]


def _are_limited(top_k: Tensor, top_p: Tensor) -> bool:
    return bool((top_k.numpy() > 0).any() or (top_p.numpy() < 1).any())


def _block(logits: Tensor, block: Tensor) -> Tensor:
    """Return the logits [rows, BLOCK] of one `block` [rows, 1] of each row, -inf beyond the vocabulary."""
    vocab = logits.shape[1]
    index = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    if vocab % BLOCK == 0:
        return logits.gather(1, index)
    return logits.gather(1, index.clamp(max=vocab - 1)).masked_fill(index >= vocab, -torch.inf)


def _workspace(device: torch.device, elements: int) -> Tensor:
    """Return FP32 memory to work in, [elements].

    On a CPU it is kept for the next call, because fresh pages cost more than the work itself; on a GPU torch's
    allocator keeps it.
    """
    if device.type != "cpu":
        return torch.empty(elements, device=device)
    return _cpu_workspace(1 << elements.bit_length())[:elements]


@cache
def _cpu_workspace(elements: int) -> Tensor:
    with torch.inference_mode(False):  # it serves calls inside and outside of that mode
        return torch.empty(elements)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the index [rows, 1] int64 of the first value of each row with which the sum exceeds the target.

    Rounding may put the target at or above the last sum; it is then taken to be just below, so that such a value exists
    and is positive. For a row whose sum is zero or overflows the index is arbitrary; `pick` draws such a row again.

    Args:
        cumulative: FP64 [rows, n], the sums of a row's first 1, 2, ..., n values.
        target: FP64 [rows, 1].
    """
    target = torch.minimum(target, cumulative[:, -1:] * JUST_BELOW)
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
