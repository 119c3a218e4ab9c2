"""Replacements for parts of vLLM other than sampling; see `replacements`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from specrl.artifacts import digest

COMPILE_SECONDS = 1800
"""How long a node's ranks wait for the first one before they compile too."""


class FirstOfItsGroup:
    """Replaces an engine's tensor-parallel group where vLLM lets only its first rank return something."""

    is_first_rank = True


def keeping_asynchronous(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a check of vLLM's configuration so that it leaves asynchronous scheduling as requested."""

    def check_and_keep(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = wanted

    return check_and_keep


def with_larger_graphs(init_candidates: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap the listing of a runner's graphs by rows so that it includes the next larger graph of every draft length."""

    def init_all(manager: Any) -> None:
        init_candidates(manager)
        full = [graph for graph in _ascending(manager) if graph.uniform_token_count is not None]
        for (rows, loras), found in manager._candidates.items():
            listed = {graph.uniform_token_count for graph in found}
            larger: dict[int, Any] = {}
            for graph in full:
                if graph.num_tokens >= rows and graph.num_active_loras == loras:
                    larger.setdefault(graph.uniform_token_count, graph)
            found[:0] = [graph for length, graph in larger.items() if length not in listed]  # piecewise ones come last

    return init_all


def _ascending(manager: Any) -> list[Any]:
    graphs = [graph for of_mode in manager._capture_descs.values() for graph in of_mode]
    return sorted(graphs, key=lambda graph: int(graph.num_tokens))


def first_on_its_node(warm_up: Callable[..., None]) -> Callable[..., None]:
    """Wrap the warm-up so that a node's first rank compiles DeepGEMM's kernels before the others look for them."""
    starts = count()

    def warm_up_in_turn(*arguments: Any) -> None:
        world = os.environ
        rank, ranks = int(world.get("RANK", "0")), int(world.get("LOCAL_WORLD_SIZE", "1"))
        names = [world.get(name) for name in ("SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")]
        done = Path(world["DG_JIT_CACHE_DIR"], f".compiled-{digest([*names, rank // ranks, next(starts)])}")
        until = time.monotonic() + COMPILE_SECONDS
        while rank % ranks and not done.exists() and time.monotonic() < until:
            time.sleep(0.2)
        try:
            warm_up(*arguments)
        finally:
            if not rank % ranks:
                done.touch()  # even if it failed: the others will find out themselves

    return warm_up_in_turn


def no_shared_memory(_: Any) -> bool:
    """Make the ranks of an engine on CPUs communicate by gloo, as they do across machines."""
    return False
