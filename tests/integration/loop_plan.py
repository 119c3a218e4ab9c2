"""What `loop_runs` is asked to run. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LoopRun:
    """One run of the loop."""

    name: str
    ranks: int = 2
    kills: int = 0
    """Ranks killed at random times, one per start."""
    resumes: str = ""
    """An earlier run of which it redoes the last step, from the checkpoint before, maybe with other ranks."""
    damaged: bool = False
    """Whether the earlier run's last checkpoint is damaged; otherwise it is gone."""
    continues: str = ""
    """A finished run from whose last checkpoint it goes on."""
    counts_on: bool = True
    """Whether its steps go on counting from there, or from 0."""
    settings: dict[str, Any] = field(default_factory=dict)
    """On top of the toy configuration, by section."""


def reward(prompt: str, response: str, answer: str) -> float:
    """Something of which a toy policy has half, and that does not depend on how long its responses are."""
    return float(len(response) % 2)
