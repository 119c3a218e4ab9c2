"""Measure what each constant of the control is worth: replays with another value against replays with its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from specrl.bench.control.bubbles import BubbleTrace, gained
from specrl.bench.control.machine import Machine
from specrl.bench.control.recording import Recording
from specrl.bench.control.replay import Replay, Workload
from specrl.bench.tables import Spread, ratios
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.estimates import NO_DRAFTS, DraftLengths, possible_lengths

CONTROLLER_WORKLOADS = (
    Workload("batch 1", "eagle3", 1, 12, ("after",) * 3),
    Workload("batch 4", "eagle3", 4, 32, ("after",) * 3),
    Workload("batch 16", "eagle3", 16, 96, ("after",) * 3),
    Workload("batch 32", "eagle3", 32, 128, ("after",) * 3),
    Workload("long tail", "eagle3", 64, 64, ("after",) * 6),
    Workload("other drafter", "eagle3", 4, 32, ("after", "useless", "useless", "before", "after", "after")),
    Workload("useless drafter", "eagle3", 16, 64, ("useless",) * 4),
    Workload("with text", "eagle3+replay", 8, 32, ("after",) * 4, replay_k=16, stored="others"),
    Workload("text alone", "replay", 16, 48, ("after",) * 3, k=0, replay_k=16, stored="earlier"),
    Workload(
        "accelerator", "eagle3+replay", 64, 64, ("after",) * 4, replay_k=16, stored="others", machine="accelerator"
    ),
)
"""The workloads on which the controller is judged."""
_BOTH, _TEXT = DraftLengths(3, 16), DraftLengths(0, 16)
TEXT_WORKLOADS = (
    Workload("own seed", "eagle3+replay", 8, 64, ("after",) * 2, replay_k=16, stored="earlier", fixed=_BOTH),
    Workload("other seeds", "eagle3+replay", 8, 64, ("after",) * 2, replay_k=16, stored="others", fixed=_BOTH),
    Workload("recent", "eagle3+replay", 8, 64, ("after",) * 2, replay_k=16, fixed=_BOTH),
    Workload("other seeds alone", "replay", 8, 64, ("after",) * 2, k=0, replay_k=16, stored="others", fixed=_TEXT),
    Workload("recent alone", "replay", 8, 64, ("after",) * 2, k=0, replay_k=16, fixed=_TEXT),
)
"""The workloads on which drafts from text are judged, at fixed draft lengths."""


CONTROLLER_CONSTANTS: Mapping[str, tuple[Any, ...]] = {
    "trial_iterations": (2, 8),
    "trial_window": (3, 6, 24, 1000),
    "trial_error": (0.01, 0.2, 1e9),
    "exploration": (0.0, 0.05, 0.2),
    "plausible": (0.1, 0.4, 1e9),
    "guessed_acceptance": (0.3, 0.8),
    "prior_requests": (5.0, 12.5, 50.0),
    "kept_on_refit": (0.01, 0.05, 0.2, 1.0),
    "worthwhile": (0.0, 0.03, 1e9),
}
"""Other values of each constant of the controller: smaller and larger ones, and some that switch it off."""
TEXT_CONSTANTS: Mapping[str, tuple[Any, ...]] = {
    "even_agreement": (1.0, 4.0),
    "prior_drafts": (1.0, 2.0, 8.0),
    "text_window": (250, 1000, 10**9),
    "least_probability": (0.05, 0.125, 0.5),
    "longest_suffix": (4, 16),
    "most_places": (8, 32, 128),
}
"""Other values of each constant of drafts from text."""
SHARE_CONSTANTS: Mapping[str, tuple[Any, ...]] = {
    "least_share": (0.02, 0.05, 0.2),
    "share_memory": (0.25, 0.5, 0.9),
    "debt_memory": (0.0, 0.4, 1.0),
}
"""Other values of each constant of the sharing of idle time."""


@dataclass(frozen=True)
class Alternative:
    """Another value of one constant."""

    name: str
    value: Any

    @staticmethod
    def all(constants: Mapping[str, Sequence[Any]]) -> list[Alternative]:
        """Return all other values of these constants."""
        return [Alternative(name, value) for name, values in constants.items() for value in values]

    def settings(self) -> ControlSettings:
        """Return the project's constants with this one changed."""
        return replace(ControlSettings(), **{self.name: self.value})


@dataclass(frozen=True)
class Worth:
    """The ratio of the score with an alternative to the score with the constant's own value."""

    alternative: Alternative
    ratio: Spread
    """The spread over the seeds of the ratio's geometric mean over the workloads."""
    worst: tuple[str, float]
    """The workload with the lowest ratio, and this ratio, a geometric mean over the seeds."""
    best: tuple[str, float]
    """The workload with the highest ratio, and this ratio."""

    @classmethod
    def of(cls, alternative: Alternative, logs: Mapping[str, Sequence[float]]) -> Worth:
        """Return the summary of logs of ratios, given by workload, one for each seed."""
        means = [math.exp(fmean(column)) for column in zip(*logs.values(), strict=True)]
        by_name = {name: math.exp(fmean(values)) for name, values in logs.items()}
        worst, best = (pick(by_name.items(), key=lambda item: item[1]) for pick in (min, max))
        return cls(alternative, Spread.of(means), worst, best)

    def row(self) -> dict[str, Any]:
        """Return the row that `--json` writes."""
        return {
            "constant": self.alternative.name,
            "value": getattr(ControlSettings(), self.alternative.name),
            "other": self.alternative.value,
            "ratio": self.ratio.median,
            "ratio_min": self.ratio.least,
            "ratio_max": self.ratio.greatest,
            "worst_workload": self.worst[0],
            "worst_ratio": self.worst[1],
            "best_workload": self.best[0],
            "best_ratio": self.best[1],
        }


@dataclass(frozen=True)
class Efficiency:
    """The controller against fixed draft lengths on one workload."""

    best: DraftLengths
    """The best fixed lengths in hindsight."""
    against_best: Spread
    """The tokens per second over those with the best fixed lengths; the spread is over the seeds."""
    against_none: Spread
    """The tokens per second over those without drafts; the spread is over the seeds."""


class Bench:
    """Replays of one recording; the result of each replay is kept."""

    def __init__(self, recording: Recording, machines: Mapping[str, Machine], seeds: Sequence[int]) -> None:
        self.recording, self.machines, self.seeds = recording, machines, seeds
        self._rates: dict[tuple[Workload, ControlSettings, int], float] = {}

    def rate(self, workload: Workload, settings: ControlSettings, seed: int) -> float:
        """Return the tokens per second of a replay."""
        key = (workload, settings, seed)
        if key not in self._rates:
            machine = self.machines[workload.machine]
            self._rates[key] = Replay(self.recording, machine, workload, settings, seed).run().rate
        return self._rates[key]

    def worth(self, alternative: Alternative, workloads: Sequence[Workload]) -> Worth:
        """Return what an alternative is worth on these workloads, with all seeds."""
        own, other = ControlSettings(), alternative.settings()
        logs = {
            workload.name: [
                math.log(self.rate(workload, other, seed) / self.rate(workload, own, seed)) for seed in self.seeds
            ]
            for workload in workloads
        }
        return Worth.of(alternative, logs)

    def efficiency(self, workload: Workload) -> Efficiency:
        """Return how the controller compares with all fixed draft lengths on a workload."""
        settings = ControlSettings()
        choices = possible_lengths(workload.k, workload.replay_k)
        rates = {
            lengths: [self.rate(replace(workload, fixed=lengths), settings, seed) for seed in self.seeds]
            for lengths in choices
        }
        best = max(choices, key=lambda lengths: fmean(rates[lengths]))
        own = [self.rate(workload, settings, seed) for seed in self.seeds]
        return Efficiency(best, ratios(own, rates[best]), ratios(own, rates[NO_DRAFTS]))


TRAINING_WORTH = {
    "training brings nothing": 0.0,
    "training brings as much": 1.0,
    "training brings four times as much": 4.0,
}
"""The workloads of sharing idle time, with what a second of training brings at first, against pre-generation."""


def bubble_worth(trace: BubbleTrace, alternative: Alternative, seeds: Sequence[int]) -> Worth:
    """Return what an alternative is worth on recorded bubbles, by the accepted tokens that their use brings."""
    own, other = ControlSettings(), alternative.settings()
    logs = {
        name: [
            math.log(gained(trace, other, seed, worth=worth) / gained(trace, own, seed, worth=worth)) for seed in seeds
        ]
        for name, worth in TRAINING_WORTH.items()
    }
    return Worth.of(alternative, logs)
