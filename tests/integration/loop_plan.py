"""What `loop_runs` is asked to run. Imports nothing heavy."""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LoopRun:
    """One run of the loop."""

    name: str
    ranks: int = 2
    kills: int = 0
    """Ranks killed at random times, one per start."""
    uneven: bool = False
    """Whether the last rank begins its share only once the first one, which has ended its own, has made use of its idle
    time: otherwise a toy's ranks may be done so soon after each other that there is time for nothing."""
    leaves: bool = False
    """Whether the ranks leave after each step, as where a job has no time for another one."""
    resumes: str = ""
    """An earlier run of which it redoes the last step, from the checkpoint before, maybe with other ranks."""
    damaged: bool = False
    """Whether the earlier run's last checkpoint is damaged; otherwise it is gone."""
    continues: str = ""
    """A finished run from whose last checkpoint it goes on."""
    counts_on: bool = True
    """Whether its steps go on counting from there, or from 0."""
    outage: tuple[int, int] = (0, 0)
    """MLflow's database is locked from the end of the first of these steps to the end of the second; such a run is the
    only one that MLflow records."""
    measures: bool = False
    """Whether it ends with the matched pairs of `validate`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """On top of the toy configuration, by section."""


ON_FAILURE = 0.25


def reward(prompt: str, response: str, answer: str) -> float:
    """Something of which a toy policy has half, and that does not depend on how long its responses are."""
    return float(len(response) % 2)


def kind(prompt: str, response: str) -> int:
    """A number from 0 to 23 that says what `failing_reward` does with a response."""
    return zlib.crc32((prompt + response).encode()) % 24


def failing_reward(prompt: str, response: str, answer: str) -> float:
    """`reward`, but for some responses it hangs, ends its process, raises or returns what is no number."""
    match kind(prompt, response):
        case 0:
            time.sleep(1000)
        case 1:
            os._exit(1)
        case 2 | 3 | 4 | 5:
            raise ValueError("no reward for this")
        case 6 | 7:
            return float("nan")
    return reward(prompt, response, answer)


def steady_reward(prompt: str, response: str, answer: str) -> float:
    """What counts where `failing_reward` fails, and otherwise its reward."""
    return ON_FAILURE if kind(prompt, response) < 8 else reward(prompt, response, answer)
