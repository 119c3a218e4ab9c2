"""The points at which `specrl bench growth` measures a step: series of them, along each of which one size grows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specrl.bench.settings import GrowthSettings
from specrl.models.families import FAMILIES
from specrl.models.shapes import ModelShape

MODELS: Mapping[str, ModelShape] = {
    "tiny": ModelShape(FAMILIES["llama"], 6, 128, 256, 4, 2, 32, 128, False, 8192),
    "135M": ModelShape(FAMILIES["llama"], 30, 576, 1536, 9, 3, 64, 49152, False, 8192),
    "360M": ModelShape(FAMILIES["llama"], 32, 960, 2560, 15, 5, 64, 49152, False, 8192),
}
"""The shapes of the random policies: a tiny one, and those of SmolLM2, with an output layer of their own."""


@dataclass(frozen=True)
class Point:
    """The sizes of a step."""

    model: str = "tiny"
    """A key of `MODELS`."""
    response_tokens: int = 64
    """The length of every response."""
    samples: int = 4
    """The number of responses to a prompt."""
    prompts: int = 2
    """The number of prompts."""
    ranks: int = 1
    """The number of ranks, each with a thread of its own."""

    @property
    def words(self) -> str:
        """The sizes in words."""
        return (
            f"{self.model}, {self.prompts} x {self.samples} responses of {self.response_tokens} tokens, "
            f"{self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"
        )


@dataclass(frozen=True)
class Series:
    """Points along which one size grows and nothing else."""

    name: str
    """The size that grows."""
    points: Mapping[float, Point]
    """The points by that size."""


def series_of(settings: GrowthSettings) -> list[Series]:
    """Return the series that the settings ask for."""
    base = Point()
    four_prompts = replace(base, prompts=4)
    found = {
        "response tokens": {float(length): replace(base, response_tokens=length) for length in settings.lengths},
        "responses to a prompt": {float(samples): replace(base, samples=samples) for samples in settings.groups},
        "ranks": {float(ranks): replace(four_prompts, ranks=ranks) for ranks in settings.ranks},
        "parameters": {float(MODELS[model].parameters): replace(base, model=model) for model in settings.models},
    }
    return [Series(name, dict(sorted(points.items()))) for name, points in found.items() if points]
