"""Measure where the time of an engine's iterations goes, with timers around parts of vLLM's V1 runner and scheduler.

The timers exist only while the context is open; without it an engine runs none of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from specrl.rollout.vllm.engine.lifecycle import VllmEngine

PARTS = ("policy", "drafter", "sampler", "scheduler")
"""The parts that are timed: `policy` is the forward pass and the head, `drafter` everything that proposes. The rest of
an iteration is vLLM's Python around them."""


@dataclass
class IterationTimes:
    """The seconds spent in each part and in `total`, summed over `iterations` engine iterations."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    total: float = 0.0
    iterations: int = 0

    @property
    def per_iteration(self) -> dict[str, float]:
        """The seconds per iteration, by part, with `other` for what no timer covers."""
        count = max(self.iterations, 1)
        parts = {part: seconds / count for part, seconds in self.seconds.items()}
        return parts | {"other": self.total / count - sum(parts.values())}


@contextmanager
def iteration_times(engine: VllmEngine) -> Iterator[IterationTimes]:
    """Measure the iterations that run inside the context; every step of the engine counts as one."""
    runner, llm_engine = engine.runner, engine.llm
    scheduler = llm_engine.engine_core.engine_core.scheduler
    times = IterationTimes()
    timed = [
        (runner, "_model_forward", "policy"),
        (runner.model, "compute_logits", "policy"),
        (runner, "propose_draft_token_ids", "drafter"),
        (runner, "_sample", "sampler"),
        (scheduler, "schedule", "scheduler"),
        (scheduler, "update_from_output", "scheduler"),
    ]
    undo = [_wrap(owner, name, _timer(getattr(owner, name), times.seconds, part)) for owner, name, part in timed]
    undo.append(_wrap(llm_engine, "step", _counted(llm_engine.step, times)))
    try:
        yield times
    finally:
        for restore in undo:
            restore()


def _timer(function: Callable[..., Any], seconds: dict[str, float], part: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = _now()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += _now() - started

    return timed


def _counted(step: Callable[[], Any], times: IterationTimes) -> Callable[[], Any]:
    def counted() -> Any:
        started = _now()
        outputs = step()
        times.total += _now() - started
        times.iterations += 1
        return outputs

    return counted


def _now() -> float:
    """Return the time in seconds, once the GPU has finished what Python has queued.

    Otherwise the GPU's time would be counted for whichever part waits for it.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Put `replacement` on the instance and return a function that takes it away again."""
    own: Mapping[str, Any] = vars(owner)
    before, had = own.get(name), name in own
    object.__setattr__(owner, name, replacement)

    def restore() -> None:
        if had:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)

    return restore
