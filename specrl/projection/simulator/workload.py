"""What a step generates: the number of responses and the distribution of their lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrl.data.dealing import deal_longest_first
from specrl.projection.tail import SimulatedResponse


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens: log-normal, cut at a limit, with lengths of the same prompt alike."""

    median: float
    """The median in tokens."""
    spread: float
    """The standard deviation of the logarithm."""
    limit: int
    """The longest response in tokens."""
    alike: float = 0.5
    """The share of the logarithm's variance that is between prompts; the rest is between responses to one prompt."""

    def draw(self, prompts: int, samples: int, generator: np.random.Generator) -> list[list[int]]:
        """Return the lengths of the responses to each prompt."""
        common = math.sqrt(self.alike) * generator.standard_normal((prompts, 1))
        own = math.sqrt(1 - self.alike) * generator.standard_normal((prompts, samples))
        drawn = self.median * np.exp(self.spread * (common + own))
        lengths: list[list[int]] = np.clip(drawn.round(), 1, self.limit).astype(int).tolist()
        return lengths


@dataclass(frozen=True)
class Workload:
    """The responses of a step."""

    prompts: int
    samples: int
    """The number of responses to each prompt."""
    lengths: Lengths

    @property
    def responses(self) -> int:
        """The number of responses of a step."""
        return self.prompts * self.samples

    def draw(self, steps: int, seed: int) -> list[list[list[int]]]:
        """Return the response lengths of each step and prompt; the same seed draws the same."""
        generator = np.random.default_rng(seed)
        return [self.lengths.draw(self.prompts, self.samples, generator) for _ in range(steps)]


def dealt(groups: Sequence[Sequence[int]], engines: int, pace: float) -> list[list[SimulatedResponse]]:
    """Return the responses of each engine.

    Prompts are dealt as training deals them, with the typical length of all responses as what is expected of each.

    Args:
        groups: The response lengths of each prompt.
        pace: The tokens of each response per iteration.
    """
    lengths = [length for group in groups for length in group]
    expected = sum(lengths) / len(lengths)
    shares = deal_longest_first([expected] * len(groups), engines, room=-(-len(groups) // engines))
    return [
        [SimulatedResponse(prompt, length, expected, pace) for prompt in share for length in groups[prompt]]
        for share in shares
    ]
