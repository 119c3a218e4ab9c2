"""The options of the four benchmarks, as their processes read them. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrl.bench.cells import Cell
from specrl.config import Config, ConfigError
from specrl.config.methods import METHODS

ADAPTIVE = "adaptive"
GPU_SECTIONS = ("sampler", "exactness", "invariance", "generation", "step", "training", "drafter", "communication")
"""The most useful first."""


@dataclass(frozen=True)
class RunOptions:
    cells: tuple[Cell, ...]  # the first of each seed is the baseline of that seed
    steps: int
    warm_up: int
    together: int | None  # trainings in memory at once, baseline included; None: all of a seed; 1: in sequence
    validate_every: int  # steps; 0: only after the last one

    @property
    def groups(self) -> list[tuple[Cell, ...]]:
        """Group the cells of each seed that take turns, at most `together` at a time, baseline first."""
        if self.together == 1:
            return [(cell,) for cell in self.cells]
        found = []
        for seed in dict.fromkeys(cell.seed for cell in self.cells):
            baseline, *others = [cell for cell in self.cells if cell.seed == seed]
            size = (self.together or len(self.cells)) - 1 or 1
            parts = [others[start : start + size] for start in range(0, len(others), size)] or [[]]
            found += [(baseline, *part) for part in parts]
        return found


@dataclass(frozen=True)
class RolloutOptions:
    methods: tuple[str, ...]  # empty: all that the run's drafter allows
    ks: tuple[int | str, ...]
    batches: tuple[int, ...]
    repeats: int
    max_tokens: int
    after_update: bool = False  # only measure how far responses follow stored text after the RL steps

    def methods_of(self, config: Config) -> tuple[str, ...]:
        """The draft methods to measure on a run."""
        own = config.speculation.draft_method
        allowed = tuple(
            row.name for row in METHODS.values() if row.drafts and (row.model is None or row.same_model(own))
        )
        for method in self.methods:
            if method not in allowed:
                raise ConfigError(f"--methods {method}: this run has no drafter for it; allowed: {', '.join(allowed)}")
        return self.methods or allowed


@dataclass(frozen=True)
class DrafterOptions:
    model: Path | None
    drafters: tuple[Path, ...]
    data: Path | None
    prompts: int
    max_tokens: int
    ks: tuple[int, ...]
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    repeats: int
    sources: tuple[str, ...]  # initialisations of a run's drafters: `none`, `general` or `task`
    steps: int

    def check(self, config: Config | None) -> None:
        """Check that the options name something to measure, on a run or on a file of prompts."""
        given = {"--model": self.model, "--drafter": self.drafters, "--data": self.data}
        if config is not None:
            method = config.speculation.draft_method
            if any(given.values()):
                raise ConfigError("bench drafter: give either --run, or --model, --drafter and --data")
            if method.model != "drafter" or method.replays or config.adopts_drafter:
                raise ConfigError(
                    f'bench drafter makes EAGLE-3 drafters; this run has speculation.method = "{method.name}" and '
                    f'drafter.source = {config.drafter.source}; use one with "eagle3" and without drafter.source'
                )
            return
        if missing := ", ".join(name for name, value in given.items() if not value):
            raise ConfigError(f"bench drafter: {missing} is missing; give --model, --drafter and --data, or --run")
        assert self.model is not None and self.data is not None
        for name, folder in (("--model", self.model), *(("--drafter", folder) for folder in self.drafters)):
            if not (folder / "config.json").is_file():
                raise ConfigError(f"{name} {folder}: there is no such folder with a config.json")
        if not self.data.is_file():
            raise ConfigError(f"--data {self.data}: it must be an existing file, in a format of drafter.data")


@dataclass(frozen=True)
class GpuOptions:
    section: str
    short: bool


OPTIONS = {"run": RunOptions, "rollouts": RolloutOptions, "drafter": DrafterOptions, "gpu": GpuOptions}
"""The options class of each benchmark."""


def chosen(text: str, option: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Split a comma-separated list of allowed words."""
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word not in allowed:
            raise ConfigError(f"{option} {word}: allowed: {', '.join(allowed)}")
    return words


def numbers(text: str, option: str, *words: str) -> tuple[int | str, ...]:
    """Split a comma-separated list of positive numbers and allowed words."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in words and not (part.isdigit() and int(part)):
            allowed = " or ".join(("positive numbers", *words))
            raise ConfigError(f"{option} {text}: {part!r} is not allowed; allowed: {allowed}, separated by commas")
    return tuple(part if part in words else int(part) for part in parts)


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    return tuple(map(int, numbers(text, option)))
