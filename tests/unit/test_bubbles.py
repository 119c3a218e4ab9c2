from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from specrl.config import ConfigError, parse_config
from specrl.data.problems import Prompt
from specrl.distributed import Ranks
from specrl.report.plots import gantt
from specrl.rollout.bubbles.coordinator import BubbleCoordinator, EngineRank, put_to_use
from specrl.rollout.bubbles.pregeneration import store_texts
from specrl.rollout.bubbles.texts import PregeneratedText
from specrl.rollout.collect import deal
from specrl.rollout.drafts.text_store import TextStore
from specrl.timeline import (
    PREGENERATION,
    SPOT_TRAINING,
    Bubble,
    RankTimeline,
    Span,
    bubble_metrics,
    joined,
    rank_spans,
    timeline_from,
)


def make_coordinators(count: int) -> list[BubbleCoordinator]:
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=300), wait_for_workers=False)
    clients = [TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(count - 1)]
    stores = enumerate([server, *clients])
    return [BubbleCoordinator(store, EngineRank(number, count), poll_seconds=0) for number, store in stores]


def test_all_are_done_when_the_last_one_says_so() -> None:
    coordinators = make_coordinators(3)
    for _ in range(3):
        for coordinator in coordinators:
            coordinator.open()
        coordinators[1].arrive()
        coordinators[0].arrive()
        assert [coordinator.all_done() for coordinator in coordinators] == [False] * 3
        coordinators[2].arrive()
        assert [coordinator.all_done() for coordinator in coordinators] == [True] * 3


def test_the_first_rank_of_an_engine_speaks_for_it() -> None:
    store = HashStore()
    ranks = [Ranks(rank, 4, rank, torch.device("cpu")) for rank in range(4)]
    places = [EngineRank.of(rank, 2) for rank in ranks]
    assert places == [EngineRank(0, 2), EngineRank(0, 2, False), EngineRank(1, 2), EngineRank(1, 2, False)]
    coordinators = [BubbleCoordinator(store, place, poll_seconds=0) for place in places]
    for coordinator in coordinators:
        coordinator.open()
    for coordinator in coordinators[:2]:
        coordinator.arrive()
    assert [coordinator.all_done() for coordinator in coordinators] == [False] * 4
    assert [coordinator.claim(5) for coordinator in coordinators[:2]] == [range(5), range(0)]
    for coordinator in coordinators[2:]:
        coordinator.arrive()
    assert [coordinator.all_done() for coordinator in coordinators] == [True, False] * 2


class TwoRanks:
    """The first rank of an engine of two; the other one has done what this one has not."""

    is_first = True

    def true_on_any_rank(self, flag: bool) -> bool:
        return True

    def agreed(self, *values: float) -> list[float]:
        return list(values)


class Alone(TwoRanks):
    """The only rank of an engine."""

    def true_on_any_rank(self, flag: bool) -> bool:
        return flag


class Use:
    """A use of idle time that goes on until it is told to stop, on both ranks of an engine or on the other alone."""

    def __init__(self, name: str, calls: list[str], works: bool) -> None:
        self.name, self._calls, self._works = name, calls, works

    def work(self, stop: Callable[[], bool]) -> bool:
        self._calls.append(self.name)
        while self._works and not stop():
            time.sleep(0.001)
        return self._works


def test_a_use_goes_on_while_any_rank_of_an_engine_has_something_to_do() -> None:
    """The first rank itself has nothing to learn from."""
    calls: list[str] = []
    training = Use(SPOT_TRAINING, calls, works=False)
    coordinator, other = make_coordinators(2)
    coordinator.open(), other.open()
    watched: Any = coordinator
    watched.all_done = lambda: len(calls) == 3
    assert put_to_use(cast(Any, TwoRanks()), coordinator, [training]) == [] and calls == [SPOT_TRAINING] * 3


def test_the_drafter_is_trained_once_nothing_is_left_to_pregenerate() -> None:
    calls: list[str] = []
    training = Use(SPOT_TRAINING, calls, works=True)
    coordinator, other = make_coordinators(2)
    coordinator.open(), other.open()
    pieces = [True, True, False]
    ahead: Any = SimpleNamespace(name=PREGENERATION, work=lambda stop: calls.append(PREGENERATION) or pieces.pop(0))
    watched: Any = coordinator
    watched.all_done = lambda: SPOT_TRAINING in calls
    spans = put_to_use(cast(Any, Alone()), coordinator, [ahead, training])
    assert calls == [PREGENERATION] * 3 + [SPOT_TRAINING]
    assert [span.name for span in spans] == [PREGENERATION] * 2 + [SPOT_TRAINING]


@pytest.mark.parametrize(("prompts", "samples", "engines"), [(5, 4, 1), (4, 4, 2), (6, 4, 3), (2, 4, 16), (3, 1, 2)])
def test_the_responses_to_a_prompt_go_to_as_many_engines_as_they_can(prompts: int, samples: int, engines: int) -> None:
    asked = [Prompt(number, "Q", [1], "") for number in range(prompts)]
    shares = [deal(asked, samples, engine, engines) for engine in range(engines)]
    found = [[(prompt.id, sample) for prompt, sample in share] for share in shares]
    everything = [(prompt, sample) for prompt in range(prompts) for sample in range(samples)]
    assert sorted(one for share in found for one in share) == everything
    assert all(share == sorted(share) for share in found)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    for number in range(prompts):
        per_engine = [sum(prompt == number for prompt, _ in share) for share in found]
        assert max(per_engine) <= -(-samples // engines)


def test_groups_of_short_responses_stay_whole() -> None:
    config = parse_config({"name": "x", "model": {"max_length": 4096}, "sampling": {"max_response_tokens": 1024}})
    assert config.whole_groups and not config.updated(train={"whole_groups": False}).whole_groups
    longer = config.updated(sampling={"max_response_tokens": 1025})
    assert not longer.whole_groups and longer.updated(train={"whole_groups": True}).whole_groups
    asked = [Prompt(number, "Q", [1], "") for number in range(4)]
    found = [deal(asked, 2, engine, 3, whole_groups=True) for engine in range(3)]
    assert [[(prompt.id, sample) for prompt, sample in share] for share in found] == [
        [(0, 0), (0, 1), (3, 0), (3, 1)],
        [(1, 0), (1, 1)],
        [(2, 0), (2, 1)],
    ]


def test_every_item_is_claimed_once_and_pieces_get_smaller() -> None:
    coordinators = make_coordinators(4)
    for _ in range(2):
        for coordinator in coordinators:
            coordinator.open()
        claimed: list[range] = []
        while piece := coordinators[len(claimed) % 4].claim(61, at_least=4):
            claimed.append(piece)
        assert [item for piece in claimed for item in piece] == list(range(61))
        assert len(claimed[0]) == 21 > len(claimed[1]) > len(claimed[2])
        assert not coordinators[1].claim(61)


def test_counters_of_past_generations_are_deleted() -> None:
    (coordinator,) = make_coordinators(1)
    for _ in range(20):
        coordinator.open()
        coordinator.arrive()
        coordinator.claim(3)
    assert coordinator._store.num_keys() < 6


def test_totals_count_waiting_use_and_overrun() -> None:
    early = Bubble(0, 100.0, 104.0, [Span(PREGENERATION, 104.0, 108.0), Span(SPOT_TRAINING, 109, 110.5)])
    late = Bubble(1, 100.5, 110.0)
    found = bubble_metrics([early, late])
    assert [found[f"bubble/{name}_s"] for name in ("idle", "used", "overrun")] == [6.0, 5.0, 0.5]
    assert bubble_metrics([late])["bubble/overrun_s"] == 0.0


def test_spans_that_follow_one_another_are_joined() -> None:
    spans = [Span("a", 0, 1), Span("a", 1.001, 2), Span("a", 3, 4), Span("b", 4, 5)]
    assert joined(spans) == [Span("a", 0, 2), Span("a", 3, 4), Span("b", 4, 5)]


def test_a_timeline_survives_json_and_is_drawn() -> None:
    bubble = Bubble(0, 100.0, 104.0, [Span(PREGENERATION, 104.0, 108.0)], 7, 0)
    timeline = RankTimeline(bubble, rank_spans(bubble, [Span("generation", 100, 111), Span("refit", 111, 112)]))
    assert timeline_from(json.loads(json.dumps(asdict(timeline)))) == timeline
    picture = gantt([timeline])
    assert "pregeneration: 4.00 to 8.00 s" in picture
    assert "refit: 11.00 to 12.00 s" in picture
    assert picture.count("<title>") == 3
    assert all(name in picture for name in (">rank 0</text>", ">generation</text>", ">refit</text>"))


def test_prompts_of_equal_text_share_their_stored_responses() -> None:
    prompts = [Prompt(number, "x", tokens, "") for number, tokens in enumerate([[1, 2], [1, 2], [3], [4]])]
    store = TextStore()
    engine: Any = SimpleNamespace(set_replay=store.store)
    store_texts(engine, prompts, [PregeneratedText(prompt, 40 + prompt, [prompt]) for prompt in (0, 1, 1, 2, 9)])
    assert [store.stored(tokens, 41)[0] for tokens in ([1, 2], [3], [4])] == [3, 1, 0]
    assert store.own([1, 2], 41) == [1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bubbles": {"use": "both"}}, ("speculation.method", "eagle3+replay")),
        ({"bubbles": {"use": "train_drafter"}, "speculation": {"method": "ngram"}}, ("needs a drafter", "eagle3")),
        ({"bubbles": {"use": "train_drafter"}, "drafter": {"online_lr": 0}}, ("drafter.online_lr",)),
        ({"bubbles": {"use": "sometimes"}}, ("bubbles.use", "pregenerate")),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(settings: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"name": "run", **settings})
    assert len(str(error.value).splitlines()) == 1
    assert all(word in str(error.value) for word in words)
