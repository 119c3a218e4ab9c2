"""The measurement of draft lengths at the start of an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from specrl.config import parse_config
from specrl.rollout import drafting
from specrl.rollout.drafting import Drafting
from specrl.rollout.vllm.engine.lifecycle import Iteration, VllmEngine


class CertainEngine:
    """Every draft has full length and is accepted."""

    graph_sizes = ()

    def __init__(self) -> None:
        self.text_speculator = SimpleNamespace(drafts=SimpleNamespace(begin=lambda stop_tokens: None), drafter_k=0)
        self.running: list[list[int]] = []  # tokens so far, and at most
        self.k = 0
        self.last: Iteration | None = None

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, prompt_tokens: list[int], max_tokens: int) -> None:
        self.running.append([0, max_tokens])

    def step(self) -> None:
        self.last = Iteration(len(self.running), all(tokens > 0 for tokens, _ in self.running), None)
        self.running = [[tokens + (self.k + 1 if tokens else 1), most] for tokens, most in self.running]
        self.running = [row for row in self.running if row[0] < row[1]]

    def end(self) -> None:
        self.running = []

    def draft_up_to(self, lengths: list[int]) -> None:
        self.k = lengths[1]

    def agreed(self, *values: float) -> list[float]:
        return list(values)


def test_every_draft_length_is_measured_though_right_drafts_soon_fill_a_short_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "generation_params", lambda request, max_length, stop_tokens: max_length - 1)
    config = parse_config(
        {
            "name": "short",
            "model": {"max_length": 64},
            "sampling": {"max_response_tokens": 32},
            "speculation": {"method": "eagle3+replay", "replay_k": 16},
            "engine": {"max_num_seqs": 2},
        }
    )
    engine: Any = CertainEngine()
    control = Drafting(cast(VllmEngine, engine), config)
    control.set_length(None)
    assert control.costs.rates(2).keys() == set(control.costs.lengths)
    assert max(control.costs.lengths) == 16
