"""What `loop_runs` is asked to run. Imports nothing heavy."""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LoopRun:
    """One run of the loop."""

    name: str
    ranks: int = 2
    kills: int = 0
    """Ranks killed at random times, one per start."""
    dies_refilling: bool = False
    """Whether the last rank is killed in the first refill of the second step."""
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


SHAPE = {"num_layers": 2, "sliding_window": 32}
"""The shape of the drafter, which is not that of most other tests."""


def toy_settings(runs_dir: Path, run: LoopRun) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "name": run.name,
        "seed": 5,
        "runs_dir": str(runs_dir),
        "model": {"source": "tiny", "dtype": "float32", "max_length": 192},
        "data": {"reward": "tests.integration.loop_plan:reward"},
        "sampling": {"max_response_tokens": 48},
        "speculation": {"method": "eagle3", "k": 3},
        "engine": {"max_num_seqs": 16, "kv_cache_gib": 0.0625},
        "policy": {"lr": 5e-6},
        "drafter": {"num_prompts": 4, "draft_vocab_size": 32, "online_lr": 1e-3, **SHAPE},
        "train": {"num_steps": 3, "prompts_per_step": 8, "samples_per_prompt": 2},
        "resources": {"ranks_per_node": run.ranks, "cpus_per_rank": 1},
    }
    for name, value in run.settings.items():
        sections[name] = {**sections.get(name, {}), **value} if isinstance(value, dict) else value
    return sections


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


class Letters:
    """An environment that writes a few letters after each turn, until one is short; it rewards every turn by itself."""

    def reset(self, problem: Any) -> list[dict[str, str]]:
        self._turns = 0
        return [{"role": "user", "content": "ac" + problem.question}] if len(problem.question) % 2 else []

    def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        self._turns += 1
        letters = "acegik"[: 1 + (len(text) + self._turns) % 5]
        return [{"role": "tool", "content": letters}], reward("", text, "") / self._turns, len(text) < 4


class FailingLetters(Letters):
    """`Letters`, but after some turns it hangs, ends its process or raises."""

    def step(self, text: str) -> tuple[list[dict[str, str]], float, bool]:
        match kind("", text):
            case 0:
                time.sleep(1000)
            case 1:
                os._exit(1)
            case 2 | 3 | 4 | 5:
                raise ValueError("no answer to this")
        return super().step(text)
