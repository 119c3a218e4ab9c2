"""The step of an 8B policy on GPUs, from what drafts were counted to bring."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specrl.models.shapes import KNOWN_SHAPES
from specrl.projection.simulator.engine import HARDWARE, EngineModel
from specrl.projection.simulator.measured import GPUS, RESPONSES, DraftCounts, step_seconds
from specrl.projection.simulator.step import Speculation, StepModel

PLAIN = DraftCounts()


def alike(k: int, pace: float, passes: float) -> DraftCounts:
    """Drafts of which every response has as many tokens accepted."""
    return DraftCounts(k, passes, pace, (pace,))


@pytest.mark.parametrize("gpus", GPUS)
def test_drafts_of_one_length_take_what_the_simulator_says_of_them(gpus: int) -> None:
    model = StepModel(EngineModel(KNOWN_SHAPES["Qwen/Qwen3-8B"], HARDWARE["H100"]), gpus, RESPONSES)
    assert step_seconds(PLAIN, gpus) == pytest.approx(model.step(Speculation()).total)
    assert step_seconds(alike(3, 3.0, 3), gpus) == pytest.approx(model.step(Speculation(3, 3.0)).total)


def test_the_longest_responses_are_drafted_as_the_longest_that_were_counted() -> None:
    usual = alike(3, 3.0, 0)
    short, long = (replace(usual, paces=paces) for paces in ((3.5,) * 9 + (1.5,), (1.5,) + (3.5,) * 9))
    assert step_seconds(long, 128) < step_seconds(usual, 128) < step_seconds(short, 128)


def test_updates_of_the_drafter_take_as_long_on_more_gpus_until_they_have_all_tokens_of_a_step() -> None:
    took = [step_seconds(PLAIN, gpus, 1.0) - step_seconds(PLAIN, gpus) for gpus in (8, 32, 4096, 8192)]
    assert took[0] == pytest.approx(took[1]) and took[1] > 0
    assert took[1] > took[2] == pytest.approx(2 * took[3])


def test_a_layer_with_the_policys_head_costs_more_a_pass_than_a_drafter_with_a_small_one() -> None:
    small = alike(3, 3.0, passes=3)
    whole = replace(small, whole_vocabulary=True)
    assert step_seconds(small, 32) < step_seconds(whole, 32)
    assert step_seconds(small, 32, 1.0) - step_seconds(small, 32) < (
        step_seconds(whole, 32, 1.0) - step_seconds(whole, 32)
    )
    free = alike(3, 3.0, passes=0)  # without passes the head costs nothing but its update
    assert step_seconds(replace(free, whole_vocabulary=True), 32) == step_seconds(free, 32)
