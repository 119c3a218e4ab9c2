"""Drafter-invariant sampling: the token at (seed, position) depends on the policy's distribution alone.

One uniform u(seed, position) from a counter-based generator picks the token by inverse CDF over the policy's processed
probabilities, drafted or not; a draft is accepted when it is that token (Daliri, Musco, Suresh: "Coupling without
communication and drafter-invariant speculative decoding", 2024). Every operation works on one row at a time, so that a
row's token does not depend on what else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specrl.rollout.nucleus import BLOCK, blocks, most_probable

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
LOW_32 = 0xFFFFFFFF
CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Logits worked on at once. On a CPU 2 MiB in FP32: fresh memory in larger pieces costs more than the work itself. On a
GPU 256 MiB, which bounds what the copies of many rows take."""


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
    plain = bool(((temperature == 1) & (top_k == 0) & (top_p == 1)).all())
    greedy = temperature == 0
    if not plain and bool(greedy.all()):
        return logits.argmax(-1), torch.zeros(logits.shape[0], device=logits.device)
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    picked = []
    for start in range(0, logits.shape[0], size):
        part = slice(start, start + size)
        if plain:
            probs = torch.softmax(logits[part].float(), -1)
        else:
            probs = probabilities(logits[part], temperature[part], top_k[part], top_p[part])
        picked.append(_inverse_cdf(probs, u[part]))
    tokens, logprobs = (torch.cat(column) for column in zip(*picked, strict=True))
    if not plain and bool(greedy.any()):
        greedy = greedy.to(logits.device)
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
        logprobs = torch.where(greedy, torch.zeros_like(logprobs), logprobs)
    return tokens, logprobs


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Processed probabilities [rows, vocab] FP32, not renormalised after top-k and top-p; greedy rows at temperature 1.

    Arguments as of `pick`. Top-k comes first, then top-p of what top-k left. Both keep every token at least as probable
    as the last one inside, so tokens tied with it stay: the set depends on the row's values, not on a sort's order.
    """
    scaled = logits.float()
    if bool(((temperature != 1) & (temperature != 0)).any()):
        divisor = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
        scaled = scaled / divisor.to(logits.device)[:, None]
    probs = torch.softmax(scaled, -1)
    if bool(((top_k > 0) | (top_p < 1)).any()):
        probs = most_probable(probs, top_k, top_p)
    return probs


def _inverse_cdf(probs: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [rows] at which the CDF of `probs` [rows, vocab] first exceeds u [rows], and their log-probs.

    Two levels instead of a cumulative sum over the vocabulary: which block, then which token in it. The block sums are
    FP32 over 64 values (relative error below 2^-21), everything after is FP64. No token of probability 0 is picked.
    """
    parts = blocks(probs)
    across = parts.sum(-1).double().cumsum(-1)  # [rows, blocks]
    total = across[:, -1]
    block, offset = _first_above(across, u * total)
    chosen = parts[torch.arange(len(parts), device=probs.device), block].double()  # [rows, BLOCK]
    token, _ = _first_above(chosen.cumsum(-1), offset)
    logprobs = (chosen.gather(-1, token[:, None])[:, 0] / total).log().float()
    return block * BLOCK + token, logprobs


def _first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index [rows] where `cumulative` [rows, n] exceeds `target` [rows], and the target less the value before it.

    Rounding may put the target at or above the last value; it is held just below, so that the index exists and is that
    of a positive step.
    """
    last = cumulative[:, -1]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    index = torch.searchsorted(cumulative, target[:, None], right=True)  # [rows, 1]
    before = cumulative.gather(-1, (index - 1).clamp(min=0)).masked_fill(index == 0, 0)
    return index[:, 0], target - before[:, 0]
