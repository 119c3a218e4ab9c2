"""Where the responses of two trainings part, and whether the reason is rounding.

Both sample with the same random numbers, so that they part where the two engines rounded the policy's distribution
differently (their batches had other shapes), and a random number lay between the two edges of a token's step in the
CDF. As long as the policies are the same, which they surely are before training, this can be checked: the policy is
computed once more, by Hugging Face's code, and says how far an edge must have moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specrl.bench.run.results import ResponseKey
from specrl.config import SamplingConfig
from specrl.rollout.sampling.inverse_cdf import uniforms, weights
from specrl.rollout.sampling.near_ties import Noise
from specrl.schemas import Rollout

MOST_CHECKED = 64
"""The largest number of partings for which the policy is computed again."""


@dataclass(frozen=True)
class Parting:
    """The first token at which a response differs from that of plain decoding."""

    step: int
    seed: int
    context: Sequence[int]
    """The tokens of the prompt and of the response before it."""
    index: int
    """Its place in the response, from 0."""
    tokens: tuple[int, int]
    """What plain decoding and the other engine picked; -1 where a response had ended."""


def find_partings(plain: Mapping[ResponseKey, Rollout], other: Mapping[ResponseKey, Rollout]) -> list[Parting]:
    """Return where responses part, one for each response that does, in the order of steps."""
    found = []
    for key in sorted(plain.keys() & other.keys()):
        left, right = plain[key].response_tokens, other[key].response_tokens
        if left == right:
            continue
        length = min(len(left), len(right))
        index = next((place for place in range(length) if left[place] != right[place]), length)
        tokens = tuple(side[index] if index < len(side) else -1 for side in (left, right))
        context = [*plain[key].prompt_tokens, *left[:index]]
        found.append(Parting(key[0], plain[key].seed, context, index, (tokens[0], tokens[1])))
    return found


@dataclass(frozen=True)
class Rounding:
    """How far the edges in the CDF must have moved where the responses of the first step part."""

    distances: Sequence[float]
    """For each parting, the least movement of an edge with which both engines are right, as a part of the CDF."""
    limit: float
    """The largest movement that rounding explains, see `specrl.rollout.sampling.near_ties`."""

    @property
    def num_explained(self) -> int:
        """The number of partings that rounding explains."""
        return sum(distance <= self.limit for distance in self.distances)


def rounding_of(partings: Iterable[Parting], policy_dir: Path, dtype: str, sampling: SamplingConfig) -> Rounding:
    """Compute the policy before training where the responses of its step part.

    Args:
        policy_dir: The policy before training, in Hugging Face's format.
        dtype: `float32` or `bfloat16`, the type in which the engines compute.
    """
    chosen = [parting for parting in partings if parting.step == 0 and min(parting.tokens) >= 0][:MOST_CHECKED]
    limit = Noise(0.0, 0.0, 0).or_rounding(dtype).limit(greedy=False)
    if not chosen:
        return Rounding([], limit)
    model: Any = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        return Rounding([distance_of(parting, model, sampling) for parting in chosen], limit)


def distance_of(parting: Parting, model: Any, sampling: SamplingConfig) -> float:
    """Return how far the random number lies from the farther one of the two tokens' steps in the CDF."""
    logits: Tensor = model(torch.tensor([parting.context])).logits[0, -1:]
    settings = (
        torch.tensor([sampling.temperature]),
        torch.tensor([sampling.top_k]),
        torch.tensor([sampling.top_p]),
    )
    found = weights(logits, *settings)[0].double()
    upper = found.cumsum(0) / found.sum()
    u = uniforms(torch.tensor([parting.seed]), torch.tensor([len(parting.context)])).item()
    edges = [(upper[token - 1].item() if token else 0.0, upper[token].item()) for token in parting.tokens]
    return max(max(low - u, u - high, 0.0) for low, high in edges)
