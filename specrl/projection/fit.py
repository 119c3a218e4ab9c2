"""Whether a run fits its ranks and, found by trial, which configuration changes would make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from specrl.config import STAGES, Config, ConfigError, change_config
from specrl.models.layout import layout_problems
from specrl.models.shapes import ModelShape
from specrl.projection.budgets import Budget, check_kv, overflow, rank_of, stage_budgets

MOST_CHANGES = 3  # settings that are changed together
GPU_FRACTIONS = tuple(step / 20 for step in range(4, 19))  # values of `engine.gpu_memory_fraction` to try


@dataclass(frozen=True)
class Fit:
    budgets: list[Budget]
    small_caches: list[str]  # KV caches that do not hold a single sequence
    notes: list[str]

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> Fit:
        """Compute what the ranks need; ConfigError for a layout that the model cannot have with any memory."""
        if problems := list(layout_problems(config, shape)):
            raise ConfigError("\n".join(problems))
        ranks = [rank_of(config, stage, shape) for stage in STAGES]
        small_caches, notes = (list(filter(None, lines)) for lines in zip(*map(check_kv, ranks), strict=True))
        return cls([budget for rank in ranks for budget in stage_budgets(rank)], small_caches, notes)

    @property
    def lacking(self) -> list[Budget]:
        return [budget for budget in self.budgets if budget.needed_gib > budget.available_gib]

    @property
    def misfits(self) -> list[str]:
        return [*self.small_caches, *map(overflow, self.lacking)]

    @property
    def excess(self) -> float:
        missing = sum(budget.needed_gib / max(budget.available_gib, 1e-9) - 1 for budget in self.lacking)
        return len(self.small_caches) + missing


def what_fits(config: Config, shape: ModelShape, fit: Fit) -> str:
    """Name, in one line, changes with which the run would fit; empty if none are found.

    Greedy: the change that leaves the smallest deficit is chosen first, then the next, up to `MOST_CHANGES`.
    """
    chosen: dict[str, str] = {}
    while fit.excess and len(chosen) < MOST_CHANGES:
        tried = []
        for key, value in _changes(config, fit):
            with suppress(ConfigError):
                if key not in chosen:
                    changed = change_config(config, [f"{key}={value}"])
                    tried.append((key, value, changed, Fit.of(changed, shape)))
        best = min(tried, key=lambda found: found[-1].excess, default=None)
        if best is None or best[-1].excess >= fit.excess:
            return ""
        key, value, config, fit = best
        chosen[key] = value
    return "" if fit.excess else "this would fit: " + " ".join(f"--set {key}={value}" for key, value in chosen.items())


def _changes(config: Config, fit: Fit) -> Iterator[tuple[str, str]]:
    """Yield changes as keys and values, the cheapest first, because the first of equally good ones is chosen."""
    policy, engine = config.policy, config.engine
    if not policy.recompute:
        yield "policy.recompute", "true"
    if config.resources_of("train").gpus_per_rank:
        nearest = sorted(GPU_FRACTIONS, key=lambda value: abs(value - engine.gpu_memory_fraction))
        yield from (("engine.gpu_memory_fraction", f"{value:g}") for value in nearest)
        if not engine.sleep:
            yield "engine.sleep", "true"
    else:
        yield "engine.kv_cache_gib", f"{2 * engine.kv_cache_gib:g}"
    if policy.tokens_per_micro_batch > config.model.max_length:
        yield "policy.tokens_per_micro_batch", str(config.model.max_length)
    for factor in (2, 4, 8):
        yield "policy.tensor_parallel", str(policy.tensor_parallel * factor)
        yield "policy.expert_parallel", str(policy.expert_parallel * factor)
        yield "engine.tensor_parallel", str(engine.tensor_parallel * factor)
    for budget in fit.lacking:
        key = f"stage_resources.{budget.stage}"
        if budget.place == "host":
            yield f"{key}.memory_gib_per_rank", str(math.ceil(budget.needed_gib))
        nodes = config.resources_of(budget.stage).nodes
        yield from ((f"{key}.nodes", str(nodes * factor)) for factor in (2, 4, 8))
