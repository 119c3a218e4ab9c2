"""What `specrl bench step` has measured, as figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specrl.bench.interleaved.side import PARTS, TrainStep
from specrl.bench.tables import Spread, ratios


@dataclass(frozen=True)
class PeerStep:
    """One step of the other trainer."""

    step_s: float
    generation_s: float
    update_s: float
    """The seconds of its forward and backward passes and of its optimizer."""
    tokens: int
    """The number of response tokens that it trained on."""
    peak_gib: float
    """The largest resident memory during the step, in GiB."""
    held_gib: float
    """The resident memory after it, in GiB."""

    @property
    def other_s(self) -> float:
        """The seconds of rewards, advantages and the like."""
        return self.step_s - self.generation_s - self.update_s


@dataclass(frozen=True)
class UpdateProducts:
    """The matrix products of one of specrl's updates, forward and backward, without those of attention."""

    tokens: int
    """The tokens of the step, each prompt counted once for all responses to it."""
    seconds: float
    """The seconds that the products take at the measured rate."""
    flops_per_s: float
    """The rate that this machine reaches on products of the policy's shape, in operations per second."""


@dataclass(frozen=True)
class StepFindings:
    """Steps of both sides; those at the same place were taken one after the other."""

    own: Sequence[TrainStep]
    peer: Sequence[PeerStep]
    peer_name: str
    peer_version: str
    products: UpdateProducts
    """Those of specrl's last step."""

    @property
    def ratio(self) -> Spread:
        """How many times as long the other trainer's step takes."""
        return ratios([step.step_s for step in self.peer], [step.seconds("step") for step in self.own])

    def own_median(self, part: str) -> float:
        """Return specrl's median seconds of a part, of `other`, or of the whole `step`."""
        return median(step.other_s if part == "other" else step.seconds(part) for step in self.own)

    def peer_median(self, value: Callable[[PeerStep], float]) -> float:
        """Return the other trainer's median of a value."""
        return median(map(value, self.peer))

    def as_json(self) -> dict[str, Any]:
        """Return the figures: medians in seconds, and below `steps` each pair of steps."""
        ratio = self.ratio
        return {
            "ratio": ratio.median,
            "ratio_min": ratio.least,
            "ratio_max": ratio.greatest,
            "specrl": {
                "step_s": self.own_median("step"),
                "generation_s": self.own_median("generation"),
                "update_s": self.own_median("policy_update"),
                "refit_s": self.own_median("refit"),
                "tokens": round(median(step.tokens for step in self.own)),
            },
            "peer": {
                "name": self.peer_name,
                "version": self.peer_version,
                "step_s": self.peer_median(lambda step: step.step_s),
                "generation_s": self.peer_median(lambda step: step.generation_s),
                "update_s": self.peer_median(lambda step: step.update_s),
                "tokens": round(self.peer_median(lambda step: step.tokens)),
            },
            "steps": [
                {
                    "specrl": {f"{part}_s": one.seconds(part) for part in ("step", *PARTS)}
                    | {"tokens": one.tokens, "peak_gib": one.peak_gib, "held_gib": one.held_gib},
                    "peer": {"step_s": other.step_s, "generation_s": other.generation_s, "update_s": other.update_s}
                    | {"tokens": other.tokens, "peak_gib": other.peak_gib, "held_gib": other.held_gib},
                }
                for one, other in zip(self.own, self.peer, strict=True)
            ],
        }
