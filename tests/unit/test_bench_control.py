"""Replays of recorded responses and times, without an engine."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from specrl.bench.control.ablation import CONTROLLER_CONSTANTS, SHARE_CONSTANTS, TEXT_CONSTANTS, Alternative, Bench
from specrl.bench.control.bubbles import BubbleTrace, gained
from specrl.bench.control.machine import Machine, fit
from specrl.bench.control.record import LONGEST_DRAFT, longest_draft
from specrl.bench.control.recording import RecordedIteration, RecordedResponse, RecordedText, Recording
from specrl.bench.control.replay import Replay, Workload
from specrl.config import Config, DrafterConfig
from specrl.rollout.control import ControlSettings
from specrl.rollout.drafts.estimates import NO_DRAFTS, DraftLengths

MACHINE = Machine([0.02, 0.0, 0.001, 0.0, 0.0, 0.003, 0.0, 0.0], [0.1, -0.1, 0.05, -0.05])
COUNT, LENGTH = 8, 21
"""Recorded responses, and the tokens of each; the first one comes with the prompt."""


def make_recording(accepted: int = 2, length: int = LENGTH, confidence: float | None = None) -> Recording:
    """Responses of random tokens; the drafter always gets `accepted` tokens right, and is always as sure."""
    generator = random.Random(0)
    rows = [[generator.randrange(1000) for _ in range(length)] for _ in range(COUNT)]
    told = [[confidence] * 5 if confidence is not None else []] * length
    responses = [
        RecordedResponse(index, 70 + index, tokens, [accepted] * length, [0] * length, told, told)
        for index, tokens in enumerate(rows)
    ]
    texts = [RecordedText(index, 70 + index, tokens) for index, tokens in enumerate(rows)]
    return Recording(5, 1, [[index] for index in range(COUNT)], responses, texts, [], [], parallel=False)


def replay(workload: Workload, recording: Recording | None = None, seed: int = 0) -> Replay:
    found = Replay(recording or make_recording(), MACHINE, workload, ControlSettings(), seed)
    found.run()
    return found


def test_every_token_is_generated_and_without_drafts_one_in_each_iteration() -> None:
    for running in (1, COUNT):
        score = replay(Workload("plain", "eagle3", running, COUNT, ("after",), fixed=NO_DRAFTS)).score
        assert score.tokens == COUNT * LENGTH
        assert score.decode_steps == COUNT // running * LENGTH


def test_drafts_of_the_drafter_are_accepted_as_recorded() -> None:
    for k, steps in ((1, 1 + 20 / 2), (2, 1 + 20 // 3 + 1), (3, 1 + 20 // 3 + 1)):
        fixed = DraftLengths(k, 0)
        assert replay(Workload("fixed", "eagle3", COUNT, COUNT, ("after",), fixed=fixed)).score.decode_steps == steps
    useless = Workload("useless", "eagle3", COUNT, COUNT, ("useless",), fixed=DraftLengths(3, 0))
    assert replay(useless).score.decode_steps == LENGTH


def test_text_of_the_own_seed_is_accepted_to_its_end() -> None:
    text = Workload("text", "replay", COUNT, COUNT, ("after",), k=0, replay_k=16, stored="earlier")
    assert replay(replace(text, fixed=DraftLengths(0, 16))).score.decode_steps == 1 + 2
    assert replay(replace(text, fixed=DraftLengths(0, 4))).score.decode_steps == 1 + 4


def test_what_was_generated_before_is_found_again() -> None:
    """The second generation finds its responses among the recent ones, once two tokens have told which it is."""
    recent = Workload("recent", "replay", COUNT, COUNT, ("after",) * 2, k=0, replay_k=16, fixed=DraftLengths(0, 16))
    assert replay(recent).score.decode_steps < 1.5 * LENGTH


def test_the_controller_does_as_well_as_fixed_lengths_and_sees_the_noise() -> None:
    workload = Workload("adaptive", "eagle3", 1, COUNT, ("after",) * 10)
    bench = Bench(make_recording(), {"recorded": MACHINE}, range(2))
    found = bench.efficiency(workload)
    assert found.best == DraftLengths(2, 0)
    assert found.against_best.least > 0.9
    assert found.against_none.least > 1.5
    same = bench.worth(Alternative("exploration", ControlSettings().exploration), [workload])
    assert (same.ratio.least, same.ratio.greatest) == (1.0, 1.0)


@pytest.mark.parametrize("told", [True, False], ids=["confident", "unconfident"])
@pytest.mark.parametrize("running", [4, 32])
def test_drafts_that_are_never_accepted_cost_at_most_two_percent(running: int, told: bool) -> None:
    """However sure the drafter is, and if it does not say; once the first generation has shown it, refits included."""
    recording = make_recording(length=96, confidence=0.9 if told else None)
    workload = Workload("losing", "eagle3", running, 3 * running, ("useless",) * 3)
    whole, first = replay(workload, recording).score, replay(replace(workload, drafters=("useless",)), recording).score
    rate = (whole.tokens - first.tokens) / (whole.seconds - first.seconds)
    plain = replay(replace(workload, fixed=NO_DRAFTS), recording).score.rate
    assert rate > 0.98 * plain
    assert first.rate > 0.94 * plain


def test_the_same_seed_gives_the_same_replay() -> None:
    workload = Workload("adaptive", "eagle3+replay", 4, COUNT, ("after",) * 3, replay_k=16, stored="earlier")
    assert replay(workload, seed=3).score == replay(workload, seed=3).score


def test_times_are_fitted() -> None:
    generator = random.Random(1)
    runs = [
        [
            RecordedIteration(
                k, 0, batch, batch * k, MACHINE.seconds(batch, batch * k, k) * generator.uniform(0.9, 1.1)
            )
            for batch in (1, 4, 16, 32)
            for _ in range(50)
        ]
        for k in (0, 1, 3, 5)
    ]
    machine = fit(runs, parallel=False)
    for batch, k in ((1, 0), (1, 3), (8, 2), (32, 5)):
        assert machine.seconds(batch, batch * k, k) == pytest.approx(MACHINE.seconds(batch, batch * k, k), rel=0.05)
    assert machine.spread() < 0.1


def test_a_parallel_drafter_takes_one_longer_pass() -> None:
    """Where a pass costs as much as it does here, k passes cost k times that; computed positions cost alike."""
    pass_s, position_s = 0.003, 0.0001
    serial = Machine([0.02, 0.0, 0.001, 0.0, 0.0, pass_s, position_s, 0.0])
    parallel = replace(serial, parallel=True)
    for batch in (1, 8):
        for k in (1, 3):
            assert serial.drafting_seconds(batch, k) == pytest.approx(k * (pass_s + batch * position_s))
            assert parallel.drafting_seconds(batch, k) == pytest.approx(pass_s + k * batch * position_s)
    runs = [
        [RecordedIteration(k, 0, batch, batch * k, parallel.seconds(batch, batch * k, k)) for batch in (1, 4, 16, 32)]
        for k in (0, 1, 3, 5)
    ]
    fitted = fit(runs, parallel=True)
    for batch, k in ((1, 0), (1, 5), (8, 2), (32, 3)):
        assert fitted.drafting_seconds(batch, k) == pytest.approx(parallel.drafting_seconds(batch, k))
    workload = Workload("fixed", "eagle3", COUNT, COUNT, ("after",), fixed=DraftLengths(3, 0))
    scores = [Replay(make_recording(), machine, workload, ControlSettings(), 0).run() for machine in (serial, parallel)]
    assert scores[0].decode_steps == scores[1].decode_steps
    saved = scores[0].seconds - scores[1].seconds
    assert saved == pytest.approx(2 * pass_s * scores[0].decode_steps)


def test_replayed_drafts_are_no_longer_than_what_a_parallel_drafter_learned() -> None:
    config = Config(name="control", drafter=DrafterConfig(parallel=True, ttt_steps=3))
    assert longest_draft(config) == 3 < LONGEST_DRAFT == longest_draft(Config(name="control"))
    workload = Workload("both", "eagle3+replay", 4, COUNT, ("after",), replay_k=16)
    assert workload.within(5) == workload
    assert workload.within(2).k == 2 and workload.within(2).replay_k == 16
    assert replace(workload, fixed=DraftLengths(3, 16)).within(2).fixed == DraftLengths(2, 16)


def test_a_recording_is_read_back(tmp_path: Path) -> None:
    recording = replace(make_recording(), iterations=[[RecordedIteration(3, 0, 2, 6, 0.5)]], parallel=True)
    recording.save(tmp_path / "recording.json")
    assert Recording.load(tmp_path / "recording.json") == recording


def test_every_constant_is_measured_against_other_values() -> None:
    tables = (CONTROLLER_CONSTANTS, TEXT_CONSTANTS, SHARE_CONSTANTS)
    assert {name for table in tables for name in table} == {item.name for item in fields(ControlSettings)}
    for item in (item for table in tables for item in Alternative.all(table)):
        assert getattr(ControlSettings(), item.name) != item.value


def test_idle_time_goes_where_it_brings_more() -> None:
    trace = BubbleTrace([(4.0, 0.0), (0.0, 2.0)], [30.0], [(0.1, 100)])
    for worth in (0.0, 16.0):
        rates = [gained(trace, ControlSettings(), 0, fixed=share, worth=worth) for share in (0.1, 0.5, 0.9)]
        best = max(rates)
        assert best in (rates[0], rates[2])
        assert gained(trace, ControlSettings(), 0, worth=worth) > 0.9 * best
