"""Which changes of a configuration would make a run fit that does not: found by trying them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specrl.config import Config, ConfigError, change_config
from specrl.projection.budgets import Budget

MOST_CHANGES = 3
"""The most settings that are changed together."""
GPU_FRACTIONS = tuple(step / 20 for step in range(4, 19))
"""The values of `engine.gpu_memory_fraction` that are tried."""


@dataclass(frozen=True)
class Fit:
    """How far a configuration is from fitting."""

    lacking: tuple[Budget, ...]
    """The memories that are too small."""
    num_caches: int
    """The number of KV caches that do not hold a single sequence."""
    is_impossible: bool
    """Whether the layout does not suit the model, whatever memory there is."""

    @property
    def excess(self) -> float:
        """A number that grows with what is missing; 0 where everything fits."""
        missing = sum(budget.needed_gib / max(budget.available_gib, 1e-9) - 1 for budget in self.lacking)
        return math.inf if self.is_impossible else self.num_caches + missing


def what_fits(config: Config, fit: Fit, examine: Callable[[Config], Fit]) -> str:
    """Return a line with changes under which the run would fit; empty if none were found.

    The change that leaves least missing is taken first, then the next one, up to `MOST_CHANGES`.

    Args:
        fit: How far the configuration is from fitting.
        examine: A function that says so of another configuration.
    """
    chosen: dict[str, str] = {}
    while 0 < fit.excess < math.inf and len(chosen) < MOST_CHANGES:
        tried = list(_tried(config, fit, chosen, examine))
        best = min(tried, key=lambda found: found[1].excess, default=None)
        if best is None or best[1].excess >= fit.excess:
            return ""
        (key, value), fit = best
        chosen[key] = value
    if fit.excess:
        return ""
    return "this would fit: " + " ".join(f"--set {key}={value}" for key, value in chosen.items())


def _tried(
    config: Config, fit: Fit, chosen: dict[str, str], examine: Callable[[Config], Fit]
) -> Iterator[tuple[tuple[str, str], Fit]]:
    """Yield each allowed change beside those chosen, and how far the run is from fitting with it."""
    for key, value in _changes(config, fit):
        if key in chosen:
            continue
        try:
            changed = change_config(config, [f"{name}={text}" for name, text in {**chosen, key: value}.items()])
        except ConfigError:
            continue
        yield (key, value), examine(changed)


def _changes(config: Config, fit: Fit) -> Iterator[tuple[str, str]]:
    """Yield changes as keys and values; of equally good ones the first is taken, so the cheapest come first."""
    policy, engine = config.policy, config.engine
    has_gpus = bool(config.resources_of("train").gpus_per_rank)
    if not policy.recompute:
        yield "policy.recompute", "true"
    if has_gpus:
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
    yield from _resources(config, fit)


def _resources(config: Config, fit: Fit) -> Iterator[tuple[str, str]]:
    """Yield more nodes and more host memory for the stages that lack memory."""
    for budget in fit.lacking:
        own, key = config.resources_of(budget.stage), f"stage_resources.{budget.stage}"
        if budget.place == "host":
            yield f"{key}.memory_gib_per_rank", str(math.ceil(budget.needed_gib))
        yield from ((f"{key}.nodes", str(own.nodes * factor)) for factor in (2, 4, 8))
