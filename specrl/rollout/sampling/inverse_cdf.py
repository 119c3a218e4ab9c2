"""Drafter-invariant sampling: the token at (seed, position) depends on the policy's distribution alone.

One uniform u(seed, position) picks the token by inverse CDF over the policy's processed probabilities, drafted or not;
a draft is accepted when it is that token (Daliri, Musco, Suresh: "Coupling without communication and drafter-invariant
speculative decoding", 2024).

Which token a row of logits gives is defined to the bit, so that neither the batch nor the device nor the order of a sum
can change it. A token's weight is 2 ** ((logit - reference) * scale) in steps of 2^-35, where `scale` is log2(e) /
temperature and the reference is the largest logit of the token's block. The power is computed by FP32 multiplications
and additions that are rounded one by one. Weights are integers (in units of 2^-35), so sums of them are exact in FP64.
The sums of the blocks are brought to the row's largest logit and rounded down, and the token is found in two levels:
its block, then the token in it. Rows with top-k or top-p take the row's largest logit as every block's reference.
`kernels` computes the same in Triton.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specrl.rollout.sampling.nucleus import is_limited, least_kept

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
LOW_32 = 0xFFFFFFFF
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
"""The number of logits worked on at once: 1 MiB in FP32 on a CPU, 256 MiB on a GPU."""

BLOCK = 1024
"""The tokens in a block. Another number would be another definition: weights are relative to their block."""
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


class Picked(NamedTuple):
    """The tokens that were picked, one for each row of logits, and their probabilities."""

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

    The words of counter and key are in [0, 2^32), and so are the four results.
    """
    # A product of two words may overflow into the sign bit: masking after the shift removes the copies of the sign.
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
    """u(seed, position) in [0, 1), FP64, with the same bits on every device.

    The key is the seed, the counter (position, 0, 0, 0). The first two words of the result, low word first, make 64
    bits, of which the upper 53 become the uniform, as NumPy makes doubles.

    Args:
        seeds: int64, in [0, 2^63).
        positions: int64, in the sequence, prompt included; they broadcast against `seeds`.
    """
    zero = torch.zeros_like(positions)
    low, high, _, _ = philox((positions & LOW_32, zero, zero, zero), (seeds & LOW_32, (seeds >> 32) & LOW_32))
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def pick(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor) -> Picked:
    """Pick one token per row by inverse CDF at `u`; all tensors are on one device.

    Args:
        logits: [rows, vocab], any floating type; at most `MAX_VOCAB` tokens.
        temperature: [rows] FP32; 0 is greedy.
        top_k: [rows] int64; 0 is all tokens.
        top_p: [rows] FP32; 1 is all tokens.
        u: [rows] FP64 in [0, 1).
    """
    assert logits.shape[1] <= MAX_VOCAB, logits.shape
    scales = _scales(temperature)
    sums, references = _block_sums(logits, scales)
    largest = references.amax(-1, keepdim=True)  # [rows, 1], NaN if any logit is
    factors = _powers((_bounded(references) - _bounded(largest)) * scales).div_(UNIT).double()
    sums.mul_(factors).floor_()
    least, whole = torch.full_like(largest, -torch.inf), sums
    is_finite = largest[:, 0].isfinite()
    limited = is_finite & (temperature > 0) & is_limited(top_k, top_p, logits.shape[1])
    if limited.any():
        rows = limited.nonzero()[:, 0]
        whole, factors, references = sums.clone(), factors.clone(), references.clone()
        settings = largest[rows], scales[rows], top_k[rows], top_p[rows]
        sums[rows], whole[rows], least[rows] = _kept_sums(logits[rows], *settings)
        references[rows], factors[rows] = largest[rows], 1
    tokens = _invert(logits, scales, sums, references, factors, least, u)
    totals = sums.sum(-1)
    exponents = (logits.gather(1, tokens) - largest).float() * scales
    logprobs = (exponents[:, 0].double() - (totals / UNIT).log2()) * math.log(2)
    log_kept_mass = (totals / whole.sum(-1)).log()
    greedy = temperature == 0
    best = logits.argmax(-1) if greedy.any() else tokens[:, 0]
    return Picked(
        torch.where(greedy, best, tokens[:, 0]).masked_fill_(~is_finite, 0),
        logprobs.masked_fill_(greedy, 0).masked_fill_(~is_finite, torch.nan).float(),
        log_kept_mass.masked_fill_(greedy | ~is_finite, 0).float(),
    )


def pick_at(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor
) -> Picked:
    """Pick one token per row at u(seed, position), with the arguments of `pick` and of `uniforms`."""
    return pick(logits, temperature, top_k, top_p, uniforms(seeds, positions))


def weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The probabilities that `pick` picks by, [rows, vocab] FP32, scaled so that the largest of a row is 1.

    Greedy rows are at temperature 1. Top-k comes first, then top-p of what it has left; both keep ties with the last
    token inside.
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
    # Sums by block, FP64 [rows, blocks], of what top-k and top-p keep and of all, and the least logit kept [rows, 1].
    wide = logits.float()
    found = _weights(wide - _bounded(largest), scales)
    whole = _split(found, 0.0).sum(-1, dtype=torch.float64)
    least = least_kept(wide, found, top_k, top_p)[:, None]
    kept = _split(found.masked_fill_(wide < least, 0), 0.0).sum(-1, dtype=torch.float64)
    return kept, whole, least


def _invert(
    logits: Tensor, scales: Tensor, sums: Tensor, references: Tensor, factors: Tensor, least: Tensor, u: Tensor
) -> Tensor:
    # The tokens [rows, 1] at `u`; `sums` are the blocks' sums times `factors`, rounded down.
    across = sums.cumsum(-1)
    totals = across[:, -1:]
    target = torch.minimum((u[:, None] * totals).floor_(), totals - 1)
    block = torch.searchsorted(across, target, right=True).clamp_(max=across.shape[1] - 1)
    inside = target - (across.gather(1, block) - sums.gather(1, block))
    chosen = _block(logits, block).float()
    found_weights = _weights(chosen - _bounded(references.gather(1, block)), scales)
    found_weights.masked_fill_(chosen < least, 0)
    within = (found_weights.cumsum(-1, dtype=torch.float64) * factors.gather(1, block)).floor_()
    token = torch.searchsorted(within, inside, right=True)
    return (block * BLOCK + token).clamp_(max=logits.shape[1] - 1)


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


def _bounded(references: Tensor) -> Tensor:
    return references.masked_fill(references == -torch.inf, 0)


def _scales(temperature: Tensor) -> Tensor:
    divisors = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    return (torch.full_like(divisors, LOG2_E) / divisors)[:, None]


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows, vocab = logits.shape
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // vocab)
    return (slice(start, start + size) for start in range(0, rows, size))


def _split(values: Tensor, filling: float = -torch.inf) -> Tensor:
    num_blocks = -(-values.shape[1] // BLOCK)
    rest = num_blocks * BLOCK - values.shape[1]
    whole = torch.nn.functional.pad(values, (0, rest), value=filling) if rest else values
    return whole.view(-1, num_blocks, BLOCK)


def _block(logits: Tensor, block: Tensor) -> Tensor:
    vocab, index = logits.shape[1], block * BLOCK + torch.arange(BLOCK, device=logits.device)
    return logits.gather(1, index.clamp(max=vocab - 1)).masked_fill(index >= vocab, -torch.inf)
