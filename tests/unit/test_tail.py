from __future__ import annotations

from dataclasses import replace

import pytest

from specrl.projection.tail import Curve, Response, Speed, decode, scaled, simulate

CURVE = Curve(((1, 1.0), (3, 2.0)))
PLAIN = Speed(CURVE, 1.0, 8.0)


def test_the_curve_is_straight_between_points_and_flat_outside() -> None:
    assert [CURVE.at(running) for running in (1, 2, 3, 9)] == [1.0, 1.5, 2.0, 2.0]


def test_decoding_slows_down_less_and_less_as_responses_end() -> None:
    work = decode([10, 20, 30], [0, 0, 0], PLAIN, most_running=8)
    assert work.seconds == pytest.approx(10 * 2.0 + 10 * 1.5 + 10 * 1.0)
    assert work.iterations == pytest.approx(30)
    assert work.tokens == pytest.approx([10, 20, 30])


def test_stored_text_and_drafts_save_iterations_and_waiting_responses_wait() -> None:
    assert decode([80], [80], PLAIN, 8).iterations == pytest.approx(10)
    assert decode([80], [40], Speed(CURVE, 2.0, 8.0), 8).iterations == pytest.approx(25)
    assert decode([10, 10], [0, 0], PLAIN, most_running=1).seconds == pytest.approx(20)


def test_a_limit_leaves_responses_unfinished() -> None:
    work = decode([10, 20], [0, 0], PLAIN, 8, limit=6.0)
    assert work.seconds == pytest.approx(6.0)
    assert work.tokens == pytest.approx([4, 4])


def make_steps(count: int) -> list[list[list[Response]]]:
    long, short = [Response(0, 100, 100), Response(0, 90, 100)], [Response(1, 10, 12), Response(1, 14, 12)]
    return [[long, short] for _ in range(count)]


def test_pregeneration_saves_time_from_the_second_step_on_and_training_saves_none() -> None:
    none = simulate(make_steps(4), PLAIN, "none", 8)
    pregenerated = simulate(make_steps(4), PLAIN, "pregenerate", 8)
    assert pregenerated[0].generation_s == none[0].generation_s
    assert pregenerated[1].generation_s < 0.5 * none[1].generation_s
    assert pregenerated[3].used_s == 0  # nothing comes after
    assert 0 < pregenerated[0].used_s <= pregenerated[0].idle_s
    trained = simulate(make_steps(4), PLAIN, "train_drafter", 8)
    assert [step.generation_s for step in trained] == [step.generation_s for step in none]
    assert trained[0].used_s == trained[0].idle_s > 0


def test_more_ranks_get_as_much_work_each_and_wait_longer() -> None:
    steps = make_steps(12)
    wide = scaled(steps, 16)
    assert len(wide) == 12 and all(len(share) == 2 for share in wide[0])
    assert wide == scaled(steps, 16)

    def idle_share(run: list[list[list[Response]]]) -> float:
        times = simulate(run, PLAIN, "none", 8)
        return sum(step.idle_s for step in times) / sum(step.generation_s * len(run[0]) for step in times)

    assert 0 < idle_share(wide) < 1


def test_both_pregenerates_for_its_share_of_a_bubble() -> None:
    steps = [[[Response(0, 100, 100)], [Response(1, 20, 20)]] for _ in range(2)]

    def stored(share: float) -> float:
        return sum(simulate(steps, replace(PLAIN, pregeneration_share=share), "both", 8)[0].stored.values())

    assert 0 < stored(0.3) < 0.5 * stored(0.9) < 0.5 * stored(1.0)
    alone, both = (simulate(steps, PLAIN, use, 8)[0] for use in ("pregenerate", "both"))
    assert both.used_s == both.idle_s == alone.idle_s


@pytest.mark.parametrize("limit", [0.1, 1 / 3, 0.7, 2 / 3 + 1e-12])
def test_a_limit_is_reached_however_it_is_rounded(limit: float) -> None:
    work = decode([10, 20, 30], [0, 0, 0], Speed(Curve(((1, 0.1 / 3), (3, 0.7 / 9))), 1.1, 8.0), 8, limit=limit)
    assert work.seconds == limit
