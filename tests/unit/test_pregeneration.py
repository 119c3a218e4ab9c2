"""Responses made while a rank waits, and a probe that sees none of them; the engine is made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specrl.config import Config, parse_config
from specrl.data.problems import Prompt
from specrl.distributed import Ranks
from specrl.rollout.bubbles.pregeneration import Pregeneration
from specrl.rollout.drafts.acceptance import DRAFTER, SourceCounts, SpeculationStats
from specrl.rollout.engine import Engine, Generation, Request, Response, StoredText
from specrl.rollout.errors import DrafterCollapseError
from specrl.rollout.refit.drafter_guard import ACCEPTANCE_LENGTH, DrafterGuard
from specrl.rollout.refit.drafter_guard import DRAFTER_RELOADS as RELOADS

PROMPTS = [Prompt(number, "x" * (number + 1), [1] * (number + 1), "") for number in range(3)]
LENGTH = 12
ALONE = Ranks(0, 1, 0, torch.device("cpu"))


class CountingEngine:
    """Its tokens are pure functions of seed and position, and every response has `LENGTH` tokens."""

    replays = True
    speculates = True
    is_first = True
    k: int | None = 1
    longest_k = 3

    def __init__(self) -> None:
        self.asked: list[list[Request]] = []
        self.recalled: list[bool] = []
        self.learned: list[bool] = []
        self.stored = [StoredText((1,), [2])]
        self.stored_when_asked: list[int] = []

    def verify_drafter(self, weights: object) -> None: ...

    def agreed(self, *values: float) -> list[float]:
        return list(values)

    def generate(
        self,
        requests: list[Request],
        *,
        stop: Callable[[], bool] | None = None,
        recall: bool = False,
        learn: bool = True,
    ) -> Generation:
        self.recalled.append(recall)
        self.learned.append(learn)
        self.asked.append(requests)
        self.stored_when_asked.append(len(self.stored))
        tokens: list[list[int]] = [[] for _ in requests]
        stopped = False
        while not stopped and any(len(row) < request.max_tokens for row, request in zip(tokens, requests, strict=True)):
            for row, request in zip(tokens, requests, strict=True):
                if len(row) < request.max_tokens:
                    row.append((request.seed + 7 * (len(request.prompt_tokens) + len(row))) % 1000)
            stopped = stop is not None and stop()
        rows = zip(tokens, requests, strict=True)
        ends = ["length" if len(row) == request.max_tokens else "abort" for row, request in rows]
        responses = [
            Response(row, [0.0] * len(row), None, "", end, 0.0, 0.0) for row, end in zip(tokens, ends, strict=True)
        ]
        stats = SpeculationStats(1, 1, 1, accepted_per_pos=(1,), drafted_per_pos=(1,))
        return Generation(responses, stats, 0.0, sum(map(len, tokens)))

    def set_replay(self, texts: list[StoredText]) -> None:
        self.stored = texts

    def set_k(self, k: int | None) -> None: ...

    def reset_prefix_cache(self) -> None: ...


class Claims:
    """All that is left, in pieces of so many."""

    def __init__(self, size: int) -> None:
        self.size, self.first = size, 0

    def claim(self, total: int, at_least: int = 1) -> range:
        first, self.first = self.first, min(total, self.first + self.size)
        return range(first, self.first)


def make_config() -> Config:
    return parse_config(
        {
            "name": "run",
            "sampling": {"max_response_tokens": LENGTH},
            "train": {"num_steps": 2, "samples_per_prompt": 2},
        }
    )


def test_all_responses_are_made_in_the_pieces_that_are_claimed() -> None:
    engine, source = CountingEngine(), SimpleNamespace(batch=lambda step: PROMPTS)
    parts: tuple[Any, ...] = (engine, source, make_config(), Claims(4), None)
    activity = Pregeneration(*parts, step=1)
    while activity.work(lambda: False):
        assert len(engine.asked) < 10
    assert len(engine.asked) == 2
    assert len({text.seed for text in activity.texts}) == len(activity.texts) == 6
    assert all(len(text.tokens) == LENGTH for text in activity.texts)
    assert all(engine.recalled)


def test_what_is_unfinished_at_the_end_is_kept_and_validation_follows_the_last_step() -> None:
    engine, source = CountingEngine(), SimpleNamespace(batch=lambda step: PROMPTS)
    parts: tuple[Any, ...] = (engine, source, make_config(), Claims(4), None)
    activity = Pregeneration(*parts, step=1)
    assert activity.work(lambda: True)
    assert [(text.prompt_id, len(text.tokens)) for text in activity.texts] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    activity = Pregeneration(*parts, step=2)  # after two steps; `validate` measures the one that would come next
    assert activity.work(lambda: True) and len(activity.texts) == 2


def test_the_guard_copies_a_drafter_once_for_each_change_into_the_same_memory() -> None:
    copies: list[float] = []
    state = {"fc": torch.zeros(2)}

    def state_dict() -> dict[str, torch.Tensor]:
        copies.append(state["fc"][0].item())
        return state

    drafter = SimpleNamespace(state_dict=state_dict, named_weights=dict, load_state_dict=dict, changes=0)
    guard = DrafterGuard(cast(Engine, CountingEngine()), cast(Any, drafter), [Request([1], 0, 1, 1.0)], ALONE)
    state["fc"] += 1  # a checkpoint is loaded after the guard was made
    drafter.changes += 1
    for version in range(3):
        assert not guard.check(version)[RELOADS]
        assert guard._last_good["fc"].tolist() == [1, 1]
    address = guard._last_good["fc"].data_ptr()
    assert copies == [1]
    state["fc"] += 1
    drafter.changes += 1
    guard.check(4)
    guard.check(4)
    assert copies == [1, 2] and guard._last_good["fc"].tolist() == [2, 2]
    assert guard._last_good["fc"].data_ptr() == address != state["fc"].data_ptr()


def test_only_a_drafter_that_was_probed_is_known_to_be_good() -> None:
    engine, state = CountingEngine(), {"fc": torch.zeros(2)}
    drafter = SimpleNamespace(state_dict=lambda: state, named_weights=dict, load_state_dict=dict, changes=0)
    guard = DrafterGuard(cast(Engine, engine), cast(Any, drafter), [Request([1], 0, 1, 1.0)], ALONE)
    guard.check(0)
    state["fc"] += 1
    drafter.changes += 1
    assert ACCEPTANCE_LENGTH not in guard.check(1, probe=False)
    assert guard._last_good["fc"].tolist() == [0, 0] and len(engine.asked) == 1
    guard.confirm(1)
    assert guard._last_good["fc"].tolist() == [1, 1] and len(engine.asked) == 2
    guard.confirm(1)
    assert len(engine.asked) == 2, "once is enough"
    assert guard.take_events() == []


def test_what_a_rank_has_trained_since_the_refit_is_not_known_to_be_good() -> None:
    """It is on no engine, so the probe is of another drafter, and it differs from rank to rank."""
    state = {"fc": torch.zeros(2)}
    drafter = SimpleNamespace(state_dict=lambda: state, named_weights=dict, load_state_dict=dict, changes=0)
    guard = DrafterGuard(cast(Engine, CountingEngine()), cast(Any, drafter), [Request([1], 0, 1, 1.0)], ALONE)
    guard.check(0)
    state["fc"] += 1
    drafter.changes += 1
    guard.check(1, probe=False)
    state["fc"] += 776
    drafter.changes += 1
    guard.confirm(1)
    assert guard.take_events() == []
    assert guard._last_good["fc"].tolist() == [0, 0]


def test_the_engines_share_the_guards_probe_and_judge_the_drafter_by_all_of_it() -> None:
    """Too few drafts are accepted on the other engine alone."""
    others = [drafted_of(100, 80), drafted_of(100, 0)]

    def gather(value: Any) -> list[Any]:
        return [value, None, (others[0], 9)] if isinstance(value, tuple) else [value]

    drafter = SimpleNamespace(state_dict=dict, named_weights=dict, load_state_dict=dict, changes=0)
    ranks: Any = SimpleNamespace(gather=gather)
    guard = DrafterGuard(cast(Engine, CountingEngine()), cast(Any, drafter), [Request([1], 0, 1, 1.0)], ranks)
    assert guard.check(0)[ACCEPTANCE_LENGTH] == 1 + 81 / 101
    del others[0]
    with pytest.raises(DrafterCollapseError, match=r"fell to 0\.010 of 101 drafts"):
        guard._check_acceptance(1)


def drafted_of(drafts: int, accepted: int) -> SpeculationStats:
    by_source = {DRAFTER: SourceCounts(drafts, drafts, accepted)}
    return SpeculationStats(drafts, drafts, accepted, (accepted,), 50, (drafts,), by_source)


def test_the_guard_probes_the_drafter_without_stored_text() -> None:
    engine = CountingEngine()
    drafter = SimpleNamespace(state_dict=dict, named_weights=dict, load_state_dict=dict, changes=0)
    guard = DrafterGuard(cast(Engine, engine), cast(Any, drafter), [Request([1], 0, 1, 1.0)], ALONE)
    assert guard.check(1)[ACCEPTANCE_LENGTH] == 2.0
    assert engine.stored_when_asked == [0]
    assert engine.recalled == engine.learned == [False]


@pytest.mark.parametrize("k", [None, 3])
def test_speculation_ends_where_neither_the_new_drafter_nor_the_last_good_one_is_accepted_as_usual(
    k: int | None,
) -> None:
    class ScriptedEngine(CountingEngine):
        def __init__(self, *accepted: tuple[int, int]) -> None:
            super().__init__()
            self.accepted = list(accepted)

        def generate(self, requests: list[Request], **options: Any) -> Generation:
            generation = super().generate(requests, **options)
            positions = self.accepted.pop(0)
            stats = SpeculationStats(100, 200, sum(positions), positions, 50, (100, 100))
            return Generation(generation.responses, stats, 0.0, generation.num_tokens)

        def refit_drafter(self, weights: object) -> None: ...

        def stop_speculating(self) -> None:
            self.speculates = False

    engine = ScriptedEngine((80, 40), (60, 10), (62, 12))
    engine.k = k
    drafter = SimpleNamespace(state_dict=dict, named_weights=dict, load_state_dict=dict, changes=0)
    guard = DrafterGuard(cast(Engine, engine), cast(Any, drafter), [Request([1], 0, 1, 1.0)], ALONE)
    guard.check(0)
    drafter.changes += 1
    report = guard.check(4)
    assert not report["refit/speculating"] and not report[RELOADS]
    (event,) = guard.take_events()
    assert "position 2 fell to 0.100" in event and "speculation is off" in event
