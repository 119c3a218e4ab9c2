"""Measures of how far training and generation disagree about the tokens that were sampled.

The functions of `training` and `generation` take flat float tensors of equal length: the natural log-probs that the
trainer and the engine give to the response tokens that the engine sampled. Both are of the whole distribution at the
sampling temperature, whatever `sampling.top_p` and `top_k` drop, so that the measures show numerics alone.
Below, p is the engine's probability of a token, q the trainer's, and r = q / p its importance ratio; expectations over
p are means over the tokens. Where `top_p` or `top_k` drop tokens, they are expectations over those that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specrl.schemas import Rollout

QUANTILES = (0.5, 0.9, 0.99, 0.999)
"""The quantiles of the importance ratio that are logged, besides the maximum."""
LARGE_RATIO = 2.0
"""The importance ratio above which `mismatch/truncated_fraction` counts a token, and `tis` truncates by default."""


def log_ratio(training: Tensor, generation: Tensor) -> Tensor:
    """Return log r = log q - log p as float64 [tokens].

    Raises:
        ValueError: There are no tokens, or not the same number on both sides.
    """
    if training.shape != generation.shape or training.ndim != 1 or not len(training):
        raise ValueError(
            f"log-probs of training {tuple(training.shape)} and generation {tuple(generation.shape)} cannot be "
            "compared: expected two flat tensors of the same length, at least 1"
        )
    return training.double() - generation.double()


def token_mult_prob_error(training: Tensor, generation: Tensor) -> float:
    """Return the mean of exp(|log q - log p|); 1 is perfect agreement, and NeMo RL asks for less than 1.1."""
    return float(log_ratio(training, generation).abs().exp().mean())


def bulk_error(training: Tensor, generation: Tensor) -> float:
    """Return `token_mult_prob_error` without the largest thousandth of its terms, and at least without the largest.

    Rounding can make a token that is nearly a toss-up hundreds of times more likely. One such token among a thousand
    would weigh as much as all others, although the engines agree. A single token gives 1, and NaN gives NaN.
    """
    terms = log_ratio(training, generation).abs().exp().sort().values
    left_out = max(1, len(terms) // 1000)
    kept = terms[:-left_out]
    return float(terms[-1] if terms[-1].isnan() else kept.mean() if len(kept) else 1.0)


def kl(training: Tensor, generation: Tensor) -> float:
    """Return Schulman's k3 estimate of KL(p || q) in nats per token: the mean of r - 1 - log r.

    It is unbiased, and none of its terms is negative.
    """
    log_r = log_ratio(training, generation)
    return float((log_r.expm1() - log_r).mean())


def js(training: Tensor, generation: Tensor) -> float:
    """Return the Jensen-Shannon divergence in nats per token, between 0 and log 2 in expectation.

    It is E_p[f(r)] with f(r) = (log(2 / (1 + r)) + r log(2 r / (1 + r))) / 2. None of its terms is negative, because f
    is convex and f(1) = f'(1) = 0.
    """
    log_r = log_ratio(training, generation)
    log_mean = torch.logaddexp(torch.zeros_like(log_r), log_r) - math.log(2.0)  # log((1 + r) / 2)
    return float((0.5 * (log_r.exp() * (log_r - log_mean) - log_mean)).mean())


def importance_ratio_quantiles(training: Tensor, generation: Tensor) -> dict[float, float]:
    """Return the quantiles of r, by their share: those in `QUANTILES`, and the maximum under 1.0."""
    ordered = log_ratio(training, generation).exp().sort().values
    positions = {share: min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1) for share in (*QUANTILES, 1.0)}
    return {share: float(ordered[position]) for share, position in positions.items()}


def truncated_fraction(training: Tensor, generation: Tensor, cap: float) -> float:
    """Return the share of the tokens whose r is above `cap`, at which truncated importance sampling cuts it off."""
    return float((log_ratio(training, generation) > math.log(cap)).double().mean())


def mismatch_metrics(training: Tensor, generation: Tensor) -> dict[str, float]:
    """Return the `mismatch/...` metrics of `specrl.metrics`."""
    quantiles = importance_ratio_quantiles(training, generation)
    return {
        "mismatch/token_mult_prob_error": token_mult_prob_error(training, generation),
        "mismatch/bulk_error": bulk_error(training, generation),
        "mismatch/kl": kl(training, generation),
        "mismatch/js": js(training, generation),
        **{f"mismatch/importance_ratio_{_suffix(share)}": ratio for share, ratio in quantiles.items()},
        "mismatch/truncated_fraction": truncated_fraction(training, generation, LARGE_RATIO),
    }


def rollout_mismatch(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the `mismatch/...` metrics over all tokens of the rollouts that were trained on; empty without any."""
    pairs = [(r.policy_logprobs, r.whole_generation_logprobs) for r in rollouts if r.policy_logprobs is not None]
    if not pairs:
        return {}
    trained = torch.tensor([value for row, _ in pairs for value in row])
    generated = torch.tensor([value for _, row in pairs for value in row])
    return mismatch_metrics(trained, generated)


def _suffix(share: float) -> str:
    """Return the ending of a quantile's metric name: `p99` for 0.99, and `max` for 1.0."""
    return "max" if share == 1.0 else "p" + f"{share:g}".removeprefix("0.").ljust(2, "0")
