"""Drafter-invariant sampling: the token at (seed, position) depends on the policy's distribution alone.

One uniform u(seed, position) from a counter-based generator picks the token by inverse CDF over the policy's processed
probabilities, drafted or not; a draft is accepted when it is that token (Daliri, Musco, Suresh: "Coupling without
communication and drafter-invariant speculative decoding", 2024). Every operation works on one row or one value at a
time, so that a row's token does not depend on what else is in the batch.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from specrl.rollout.sampling.nucleus import BLOCK, blocks, most_probable

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
LOW_32 = 0xFFFFFFFF
CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Logits worked on at once: in FP32 2 MiB on a CPU, which its caches hold, 256 MiB on a GPU."""
COMMON_TOTAL = (1e-10, 1e30)
"""Sums of exp(logit) between which FP32 needs no shift by the largest logit: the pass over the vocabulary is saved."""

JUST_BELOW = 1 - 2.0**-52
"""Times an FP64 number: a smaller one, by a unit in its last place or two."""


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) on int64 tensors.

    Counter and key words are in [0, 2^32), so are the four results. A product of two words overflows int64 at most into
    the sign; its 64 bits stay right, and masking after the shift takes the sign away.
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
    """u(seed, position) in [0, 1), FP64, the same bits on every device.

    `seeds` (63 bit) and `positions` (absolute position of the token in its sequence) are int64 and broadcast against
    each other. Key: low and high word of the seed; counter: (position, 0, 0, 0); the first two words of the result
    make 64 bits, low word first, of which the upper 53 are the uniform, as NumPy makes doubles.
    """
    zero = torch.zeros_like(positions)
    low, high, _, _ = philox((positions & LOW_32, zero, zero, zero), (seeds & LOW_32, (seeds >> 32) & LOW_32))
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def pick(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Pick one token per row by inverse CDF at `u`.

    Args:
        logits: [rows, vocab], any floating type.
        temperature: [rows] FP32 on the CPU; 0 is greedy.
        top_k: [rows] int64 on the CPU; 0 is all tokens.
        top_p: [rows] FP32 on the CPU; 1 is all tokens.
        u: [rows] FP64 in [0, 1), on the logits' device.

    Returns:
        Tokens [rows] int64 and their log-probs [rows] FP32 under the distribution sampled from (0 where greedy), on
        the logits' device.
    """
    is_greedy = temperature.numpy() == 0
    if is_greedy.all():
        return most_likely(logits), torch.zeros(logits.shape[0], device=logits.device)
    tokens, logprobs, totals = _draw(logits, temperature, top_k, top_p, u, None)
    least, most = torch.aminmax(totals)  # not a number where any of them is not
    if not (least.item() > COMMON_TOTAL[0] and most.item() < COMMON_TOTAL[1]):
        rows = ((totals > COMMON_TOTAL[0]) & (totals < COMMON_TOTAL[1])).logical_not_().nonzero()[:, 0]
        own = rows.to(temperature.device)
        settings = temperature[own], top_k[own], top_p[own]
        largest = _largest(logits[rows], _divisors(settings[0], logits.device))
        tokens[rows], logprobs[rows], _ = _draw(logits[rows], *settings, u[rows], largest)
    if is_greedy.any():
        greedy = torch.from_numpy(is_greedy).to(logits.device)
        tokens = torch.where(greedy, most_likely(logits), tokens)
        logprobs = torch.where(greedy, torch.zeros_like(logprobs), logprobs)
    return tokens, logprobs


def weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """What `pick` picks from: processed probabilities [rows, vocab] FP32, times a factor that makes a row's largest 1.

    Greedy rows are at temperature 1. Top-k comes first, then top-p of what top-k left. Both keep every token at least
    as probable as the last one inside, so tokens tied with it stay: the set depends on the row's values, not on a
    sort's order. Arguments as of `pick`.
    """
    divisors = _divisors(temperature, logits.device)
    found = _exponentials(logits, divisors, _largest(logits, divisors))
    return most_probable(found, top_k, top_p)[0] if _are_limited(top_k, top_p) else found


def most_likely(logits: Tensor) -> Tensor:
    """The first of each row's largest logits [rows]. On CPUs torch's own argmax over a vocabulary is not vectorised."""
    rows, vocab = logits.shape
    if vocab % BLOCK:
        return logits.argmax(-1)
    block = logits.view(rows, -1, BLOCK).amax(-1).argmax(-1, keepdim=True)
    return block[:, 0] * BLOCK + _block(logits, block).argmax(-1)


def _draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs and sums of exp(logit - shift) [rows]; every row is sampled, greedy ones at temperature 1.

    Two levels instead of a cumulative sum over the vocabulary: which block, then which token in it. The block sums are
    FP32 over 64 values (relative error below 2^-21), everything after is FP64. No token of probability 0 is picked.
    The exponentials of the block are computed once more: keeping all of them would take memory that is slower.
    """
    rows, vocab = logits.shape
    divisors, limited = _divisors(temperature, logits.device), _are_limited(top_k, top_p)
    sums = torch.empty(rows, -(-vocab // BLOCK), device=logits.device)
    least = torch.zeros(rows if limited else 0, device=logits.device)
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // vocab)
    workspace = _workspace(logits.device, size * vocab)
    for start in range(0, rows, size):
        part = slice(start, start + size)
        out = workspace[: min(size, rows - start) * vocab].view(-1, vocab)
        found = _exponentials(logits[part], _rows(divisors, part), _rows(shift, part), out)
        if limited:
            found, least[part] = most_probable(found, top_k[part], top_p[part])
        torch.sum(blocks(found), -1, out=sums[part])
    across = sums.cumsum(-1, dtype=torch.float64)
    totals = across[:, -1]
    target = (u * totals)[:, None]
    block = _first_above(across, target)
    before = across.gather(-1, block) - sums.gather(-1, block)
    chosen = _exponentials(_block(logits, block), divisors, shift)
    if limited:
        chosen = chosen.masked_fill_(chosen < least[:, None], 0)
    token = _first_above(chosen.cumsum(-1, dtype=torch.float64), target - before)
    logprobs = (chosen.gather(-1, token)[:, 0] / totals).log().float()
    return (block * BLOCK + token)[:, 0], logprobs, totals


def _exponentials(logits: Tensor, divisors: Tensor | None, shift: Tensor | None, out: Tensor | None = None) -> Tensor:
    """exp(logits / divisors - shift), FP32, a value at a time: the same bits wherever a value stands."""
    scaled = logits.to(torch.float32, copy=True) if out is None else out.copy_(logits)
    if divisors is not None:
        scaled.div_(divisors)
    if shift is not None:
        scaled.sub_(shift)
    return scaled.exp_()


def _largest(logits: Tensor, divisors: Tensor | None) -> Tensor:
    """Largest scaled logit, FP32 [rows, 1]."""
    largest = logits.amax(-1, keepdim=True).float()
    return largest if divisors is None else largest / divisors


def _divisors(temperature: Tensor, device: torch.device) -> Tensor | None:
    """Temperatures FP32 [rows, 1], 1 where greedy; none if all are 1."""
    values = temperature.numpy()  # without torch's overhead per operation, as below
    if not ((values != 1) & (values != 0)).any():
        return None
    return torch.where(temperature == 0, torch.ones_like(temperature), temperature).to(device)[:, None]


def _are_limited(top_k: Tensor, top_p: Tensor) -> bool:
    return bool((top_k.numpy() > 0).any() or (top_p.numpy() < 1).any())


def _rows(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _block(logits: Tensor, block: Tensor) -> Tensor:
    """The logits [rows, BLOCK] of one `block` [rows, 1] of each row; -inf beyond the vocabulary."""
    vocab = logits.shape[1]
    index = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    if vocab % BLOCK == 0:
        return logits.gather(1, index)
    return logits.gather(1, index.clamp(max=vocab - 1)).masked_fill(index >= vocab, -torch.inf)


def _workspace(device: torch.device, elements: int) -> Tensor:
    """Memory to work in; kept on a CPU, where fresh pages cost more than the work, and by a GPU's own allocator."""
    return _cpu_workspace(elements) if device.type == "cpu" else torch.empty(elements, device=device)


@cache
def _cpu_workspace(elements: int) -> Tensor:
    return torch.empty(elements)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Which value [rows, 1] takes the sum above the target.

    Rounding may put the target at or above the last sum; it is held just below, so that the value exists and is
    positive. It is any of those of a row that sums up to zero or overflows, which is drawn again.

    Args:
        cumulative: FP64 [rows, n], sums of a row's first 1, 2, ..., n values.
        target: FP64 [rows, 1].
    """
    target = torch.minimum(target, cumulative[:, -1:] * JUST_BELOW)
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
