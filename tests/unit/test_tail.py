from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specrl.projection.measured import growth, other_following, responses, typical_pace, usual_following
from specrl.projection.tail import DecodingSpeed, IterationCurve, SimulatedResponse, decode, scaled, simulate
from specrl.schemas import Rollout, rollout_path, write_rollouts

CURVE = IterationCurve(((1, 1.0), (3, 2.0)))
SPEED = DecodingSpeed(CURVE, 8.0)


def make(*lengths: int, pace: float = 1.0) -> list[SimulatedResponse]:
    return [SimulatedResponse(prompt, length, length, pace) for prompt, length in enumerate(lengths)]


def test_the_curve_is_straight_between_points_and_flat_outside() -> None:
    assert [CURVE.at(running) for running in (1, 2, 3, 9)] == [1.0, 1.5, 2.0, 2.0]


def test_decoding_slows_down_less_and_less_as_responses_end() -> None:
    work = decode(make(10, 20, 30), [0, 0, 0], SPEED, most_running=8)
    assert work.seconds == pytest.approx(10 * 2.0 + 10 * 1.5 + 10 * 1.0)
    assert work.iterations == pytest.approx(30)
    assert work.tokens == pytest.approx([10, 20, 30])


def test_stored_text_and_drafts_save_iterations_and_waiting_responses_wait() -> None:
    assert decode(make(80), [80], SPEED, 8).iterations == pytest.approx(10)
    assert decode(make(80, pace=2.0), [40], SPEED, 8).iterations == pytest.approx(25)
    assert decode(make(10, 10), [0, 0], SPEED, most_running=1).seconds == pytest.approx(20)


def test_a_limit_leaves_responses_unfinished() -> None:
    work = decode(make(10, 20), [0, 0], SPEED, 8, limit=6.0)
    assert work.seconds == pytest.approx(6.0)
    assert work.tokens == pytest.approx([4, 4])


def make_steps(count: int) -> list[list[list[SimulatedResponse]]]:
    long = [SimulatedResponse(0, 100, 100, 1.0), SimulatedResponse(0, 90, 100, 1.0)]
    short = [SimulatedResponse(1, 10, 12, 1.0), SimulatedResponse(1, 14, 12, 1.0)]
    return [[long, short] for _ in range(count)]


def test_pregeneration_saves_time_from_the_second_step_on_and_training_saves_none() -> None:
    none = simulate(make_steps(4), SPEED, "none", 8)
    pregenerated = simulate(make_steps(4), SPEED, "pregenerate", 8)
    assert pregenerated[0].generation_s == none[0].generation_s
    assert pregenerated[1].generation_s < 0.5 * none[1].generation_s
    assert pregenerated[3].used_s == 0  # nothing comes after
    assert 0 < pregenerated[0].used_s <= pregenerated[0].idle_s
    trained = simulate(make_steps(4), SPEED, "train_drafter", 8)
    assert [step.generation_s for step in trained] == [step.generation_s for step in none]
    assert trained[0].used_s == trained[0].idle_s > 0


def test_more_ranks_get_as_much_work_each_and_wait_longer() -> None:
    steps = make_steps(12)
    wide = scaled(steps, 16)
    assert len(wide) == 12 and all(len(share) == 2 for share in wide[0])
    assert wide == scaled(steps, 16)

    def idle_share(run: list[list[list[SimulatedResponse]]]) -> float:
        times = simulate(run, SPEED, "none", 8)
        return sum(step.idle_s for step in times) / sum(step.generation_s * len(run[0]) for step in times)

    assert 0 < idle_share(wide) < 1


def test_both_pregenerates_for_its_share_of_a_bubble() -> None:
    steps = [[[SimulatedResponse(0, 100, 100, 1.0)], [SimulatedResponse(1, 20, 20, 1.0)]] for _ in range(2)]

    def stored(share: float) -> float:
        return sum(simulate(steps, replace(SPEED, pregeneration_share=share), "both", 8)[0].stored.values())

    assert 0 < stored(0.3) < 0.5 * stored(0.9) < 0.5 * stored(1.0)
    alone, both = (simulate(steps, SPEED, use, 8)[0] for use in ("pregenerate", "both"))
    assert both.used_s == both.idle_s == alone.idle_s


@pytest.mark.parametrize("limit", [0.1, 1 / 3, 0.7, 2 / 3 + 1e-12])
def test_a_limit_is_reached_however_it_is_rounded(limit: float) -> None:
    work = decode(
        make(10, 20, 30, pace=1.1),
        [0, 0, 0],
        DecodingSpeed(IterationCurve(((1, 0.1 / 3), (3, 0.7 / 9))), 8.0),
        8,
        limit=limit,
    )
    assert work.seconds == limit


@pytest.mark.parametrize(
    ("accepted", "own_stored", "expected"),
    [
        (0, 0, (1.0, None)),
        (15, 0, (4.0, None)),
        (
            13,
            10,
            (2.0, 1.0),
        ),  # ten stored tokens in two iterations, the others in five at the typical pace
        (14, 10, (10 / 4, 1.0)),  # all of the text, and a better pace after it
        (12, 20, (2.0, 1 / 3)),  # a third of the text, then another way: 20 / 3 / 5 + 40 / 3 / 2 iterations
        (8, 10, (20 / 12, 0.0)),  # none of it, and a worse pace
    ],
)
def test_a_response_grows_as_it_did_beside_its_stored_text(
    accepted: int, own_stored: int, expected: tuple[float, float | None]
) -> None:
    """20 tokens in 20 - accepted iterations, at five tokens each along stored text."""
    rollout = make_rollout(accepted, own_stored)
    pace, follows = growth(rollout, 5.0, typical=2.0)
    assert (pace, follows) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
    response = SimulatedResponse(0, 20, 20.0, pace, follows or 0.0)
    assert response.iterations(own_stored, 5.0) == pytest.approx(20 - accepted)


def test_what_little_is_left_beside_its_text_tells_nothing_of_a_responses_pace() -> None:
    """All 20 tokens were stored and followed, in three iterations instead of four."""
    assert growth(make_rollout(17, 20), 5.0, typical=2.0) == (2.0, 1.0)


def test_the_typical_pace_is_that_beside_text_stored_for_the_prompt() -> None:
    rollouts = [make_rollout(10, 0), make_rollout(0, 0), make_rollout(18, 20)]
    assert typical_pace(rollouts, (2, 18)) == pytest.approx(40 / 30)  # the third took two drafts, all accepted
    assert typical_pace(rollouts[:2], (0, 0)) == pytest.approx(40 / 30)
    assert typical_pace([make_rollout(18, 20)], (2, 18)) == 1.0


def test_each_step_has_a_pace_of_its_own(tmp_path: Path) -> None:
    """Recent rollouts make later steps faster, also where no text is stored for a prompt."""
    for step, accepted in enumerate((0, 10)):
        rows = [replace(make_rollout(accepted, 0), step=step), replace(make_rollout(18, 20), step=step)]
        write_rollouts(rollout_path(tmp_path, step, 0), rows)
    records: list[dict[str, Any]] = [{"step": step, "by_source": {"replay": [2, 32, 18]}} for step in range(2)]
    (first, text), (second, _) = (step[0] for step in responses(tmp_path, records, DecodingSpeed(CURVE, 10.0)))
    assert (first.pace, second.pace, text.follows) == (1.0, 2.0, 1.0)


def test_text_is_followed_as_usual_by_responses_that_had_none() -> None:
    rollouts = [make_rollout(10, 0), make_rollout(13, 10), make_rollout(12, 20)]
    assert usual_following(rollouts, 5.0, {0: 2.0}) == pytest.approx((10 + 20 / 3) / 30)
    assert usual_following(rollouts[:1], 5.0, {0: 2.0}) is None


def test_text_of_other_seeds_is_followed_as_far_as_it_brought_tokens() -> None:
    bubble = {"bubble": {"pregenerated_tokens": 60}}
    records: list[dict[str, Any]] = [
        {"by_source": {}, "ranks": [bubble, bubble]},
        {"by_source": {"replay": [6, 40, 24]}, "ranks": [bubble, bubble]},
    ]
    assert other_following(records) == 30 / 120
    assert other_following(records[:1]) == 1.0
    beside = replace(make_rollout(13, 0), num_stored=4)
    assert growth(beside, 5.0, typical=2.0) == (2.0, None)


def test_runs_on_the_same_prompts_are_scaled_alike_however_they_were_dealt() -> None:
    steps = [[[*share] for share in step] for step in make_steps(3)]
    turned = [step[::-1] for step in steps]
    assert scaled(steps, 8) == scaled(turned, 8)


def make_rollout(accepted: int, own_stored: int) -> Rollout:
    rollout = Rollout(0, 0, 0, 0, 0, 0, 1, [1, 2], [3] * 20, [0.0] * 20, "", "", "stop")
    rollout.num_accepted_tokens, rollout.own_stored_tokens = accepted, own_stored
    return rollout
