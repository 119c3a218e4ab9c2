"""The simulated generation of a step: the tail of long responses, and what idle engines do meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specrl.projection.simulator import generation
from specrl.projection.simulator.generation import DecodingSpeed, SimulatedResponse, decode, simulate
from specrl.projection.simulator.step import Drawn, MeasuredRun, Workload, dealt
from specrl.schemas import Rollout, rollout_path, write_rollouts


def curve(running: int, generated: float) -> float:
    return min(1.0 + (running - 1) / 2, 2.0)


SPEED = DecodingSpeed(curve)


def make(*lengths: int, pace: float = 1.0) -> list[SimulatedResponse]:
    return [SimulatedResponse(prompt, length, pace) for prompt, length in enumerate(lengths)]


def test_decoding_slows_down_less_and_less_as_responses_end() -> None:
    work = decode(make(10, 20, 30), [0, 0, 0], SPEED, most_running=8)
    assert work.seconds == pytest.approx(10 * 2.0 + 10 * 1.5 + 10 * 1.0)
    assert work.iterations == pytest.approx(30)
    assert work.tokens == pytest.approx([10, 20, 30])


def test_stored_text_and_drafts_save_iterations_and_waiting_responses_wait() -> None:
    assert decode(make(80), [80], SPEED, 8).iterations == pytest.approx(0)
    assert decode(make(80, pace=2.0), [40], SPEED, 8).iterations == pytest.approx(20)
    assert decode(make(10, 10), [0, 0], SPEED, most_running=1).seconds == pytest.approx(20)


def test_text_is_read_until_it_differs_and_as_much_again_at_most() -> None:
    speed = DecodingSpeed(curve, read_s=0.1, carried=200)
    work = decode(make(800), [700], speed, 8)
    assert work.iterations == pytest.approx(600) and work.seconds == pytest.approx(600 + 40)
    work = decode(make(800), [300], speed, 8)
    assert work.seconds == pytest.approx(600 + 30) and work.tokens == [800]
    few = decode(make(80), [70], replace(speed, carried=1), 8)
    assert few.seconds == pytest.approx(79 + 6.4)  # the first pass


def test_no_more_idle_time_is_used_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_pregenerate", lambda *_: ({}, 1e9))  # such as rounding makes more of it
    steps = [[make(10), make(30)], [make(10), make(30)]]
    for use in ("pregenerate", "both"):
        assert [time.used_s for time in simulate(steps, SPEED, use, 8)] == [20.0, 20.0]


def test_a_limit_leaves_responses_unfinished() -> None:
    work = decode(make(10, 20), [0, 0], SPEED, 8, limit=6.0)
    assert work.seconds == pytest.approx(6.0)
    assert work.tokens == pytest.approx([4, 4])


def make_steps(count: int) -> list[list[list[SimulatedResponse]]]:
    long = [SimulatedResponse(0, 100, 1.0, sample=0), SimulatedResponse(0, 90, 1.0, sample=1)]
    short = [SimulatedResponse(1, 10, 1.0, sample=0), SimulatedResponse(1, 14, 1.0, sample=1)]
    return [[long, short] for _ in range(count)]


def test_pregeneration_saves_time_from_the_second_step_on_and_training_saves_none() -> None:
    none = simulate(make_steps(4), SPEED, "none", 8)
    pregenerated = simulate(make_steps(4), SPEED, "pregenerate", 8)
    assert pregenerated[0].seconds == none[0].seconds
    assert pregenerated[1].seconds < 0.5 * none[1].seconds
    assert pregenerated[3].used_s == 0  # nothing comes after
    assert 0 < pregenerated[0].used_s <= pregenerated[0].idle_s
    trained = simulate(make_steps(4), SPEED, "train_drafter", 8)
    assert [step.seconds for step in trained] == [step.seconds for step in none]
    assert trained[0].used_s == trained[0].idle_s > 0


MEASURED = MeasuredRun(tuple((Drawn(100 + i), Drawn(90)) for i in range(6)) + ((Drawn(10), Drawn(14)),) * 6, (), 1.0)


def test_more_ranks_get_as_much_work_each_and_wait_longer() -> None:
    def wide() -> list[list[list[SimulatedResponse]]]:
        return [dealt(groups, 16, 0, 1.0) for groups in Workload(16, 2, MEASURED).draw(12, seed=0)]

    assert len(wide()) == 12 and all(len(share) == 2 for share in wide()[0])
    assert wide() == wide()

    def idle_share(run: list[list[list[SimulatedResponse]]]) -> float:
        times = simulate(run, SPEED, "none", 8)
        return sum(step.idle_s for step in times) / sum(step.seconds * len(run[0]) for step in times)

    assert 0 < idle_share(wide()) < 1


def test_engines_wait_less_where_responses_to_one_prompt_go_to_different_ones() -> None:
    groups = [[Drawn(10 * (prompt + 1) + sample) for sample in range(4)] for prompt in range(8)]
    lengths = sorted(item.tokens for group in groups for item in group)

    def idle_s(*, whole_groups: bool) -> float:
        shares = dealt(groups, 4, 0, 1.0, whole_groups=whole_groups)
        assert sorted(item.length for share in shares for item in share) == lengths
        return simulate([shares], SPEED, "none", 8)[0].idle_s

    assert idle_s(whole_groups=False) < 0.25 * idle_s(whole_groups=True)


def test_an_engine_reads_each_of_its_prompts_once() -> None:
    speed = replace(SPEED, read_s=0.1, prompt_tokens=50)
    twice = [SimulatedResponse(0, 10, 1.0, sample) for sample in range(2)]
    assert decode(twice, [0, 0], speed, 8).seconds - decode(twice, [0, 0], SPEED, 8).seconds == pytest.approx(5)


def test_both_pregenerates_and_uses_the_rest_of_a_bubble() -> None:
    steps = [[[SimulatedResponse(0, 100, 1.0)], [SimulatedResponse(1, 20, 1.0)]] for _ in range(2)]
    alone, both = (simulate(steps, SPEED, use, 8)[0] for use in ("pregenerate", "both"))
    assert both.stored == alone.stored and sum(both.stored.values()) > 0
    assert both.used_s == both.idle_s == alone.idle_s


@pytest.mark.parametrize("limit", [0.1, 1 / 3, 0.7, 2 / 3 + 1e-12])
def test_a_limit_is_reached_however_it_is_rounded(limit: float) -> None:
    speed = DecodingSpeed(lambda running, _: 0.1 / 3 + (0.7 / 9 - 0.1 / 3) * (running - 1) / 2)
    work = decode(make(10, 20, 30, pace=1.1), [0, 0, 0], speed, 8, limit=limit)
    assert work.seconds == limit


def test_a_run_is_simulated_with_its_own_lengths_and_acceptance(tmp_path: Path) -> None:
    """Two prompts with two responses each; the long ones are drafted better."""
    for step in range(2):
        rows = [make_rollout(step, prompt, tokens, accepted) for prompt, tokens, accepted in ((0, 30, 20), (1, 12, 4))]
        write_rollouts(rollout_path(tmp_path / "rollouts", step, 0), rows + [replace(row, sample=1) for row in rows])
        metrics = {f"spec/acceptance_rate_pos_{i}": 0.8 / i - 0.1 * step for i in range(1, 3 + step)}
        metrics["timing/generation_s"] = 4.0
        record = tmp_path / "steps" / f"step={step:06d}.json"
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps({"metrics": metrics}))
    run = MeasuredRun.read(tmp_path / "steps", tmp_path / "rollouts")
    third = (0.8 / 3 - 0.1) / 2  # one of the two steps had no third draft
    assert run.acceptance == pytest.approx((0.75, 0.35, third)) and run.generation_s == 4.0
    usual = 24 / 18
    assert sorted(set(run.groups)) == [(Drawn(12, 0.5 / usual),) * 2, (Drawn(30, 2.0 / usual),) * 2]
    [groups] = Workload(5, 3, run).draw(1, seed=0)
    assert len(groups) == 5 and all(len(group) == 3 and set(group) <= set(sum(run.groups, ())) for group in groups)
    paces = {item.length: item.pace for share in dealt(run.groups, 2, 3, 2.0) for item in share}
    assert paces == pytest.approx({12: 1.375, 30: 2.5})
    with pytest.raises(ValueError, match="has not trained yet"):
        MeasuredRun.read(tmp_path / "nothing", tmp_path / "rollouts")


def test_tokens_that_were_read_ahead_say_nothing_of_how_a_response_is_drafted(tmp_path: Path) -> None:
    read = replace(make_rollout(0, 2, 100, 99), own_stored_tokens=120)
    rows = [make_rollout(0, 0, 30, 20), make_rollout(0, 1, 12, 4), read]
    write_rollouts(rollout_path(tmp_path / "rollouts", 0, 0), rows)
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "step=000000.json").write_text(json.dumps({"metrics": {"timing/generation_s": 4.0}}))
    run = MeasuredRun.read(tmp_path / "steps", tmp_path / "rollouts")
    usual = 24 / 18
    assert sorted(set(run.groups)) == [(Drawn(12, 0.5 / usual),), (Drawn(30, 2.0 / usual),), (Drawn(100, 1.0),)]


def test_measured_prompts_are_drawn_evenly() -> None:
    drawn = MEASURED.draw(1200, 1, np.random.default_rng(0))
    assert 500 < sum(group[0].tokens > 50 for group in drawn) < 700


def make_rollout(step: int, prompt: int, tokens: int, accepted: int) -> Rollout:
    rollout = Rollout(step, 0, prompt, 0, 0, 0, 1, [1, 2], [3] * tokens, [0.0] * tokens, "", "", "stop")
    rollout.num_accepted_tokens = accepted
    return rollout
