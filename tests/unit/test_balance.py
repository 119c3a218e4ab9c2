from __future__ import annotations

from pathlib import Path

import pytest

from specrl.data.problems import Prompt
from specrl.rollout.bubbles.balance import WINDOW, ResponseLengthEstimator, deal, stored_lengths
from specrl.schemas import Rollout, rollout_path, write_rollouts


def make_prompt(number: int, terms: int, tokens: int = 10) -> Prompt:
    metadata = {"generator": 0, "entry": {"terms": [1] * terms}}
    return Prompt(number, str(number), list(range(tokens)), "1", metadata)


def test_expected_length_is_the_mean_of_the_same_difficulty() -> None:
    expected = ResponseLengthEstimator()
    prompts = [make_prompt(0, 2), make_prompt(1, 12)]
    expected.learn(prompts, [(0, 10), (0, 20), (1, 90), (1, 110), (77, 1000)])
    assert expected.of(make_prompt(5, 2)) == 15
    assert expected.of(make_prompt(6, 12)) == 100


def test_without_history_a_longer_prompt_is_expected_to_take_longer() -> None:
    expected = ResponseLengthEstimator()
    assert expected.of(make_prompt(0, 2, tokens=5)) < expected.of(make_prompt(1, 3, tokens=9))
    expected.learn([make_prompt(0, 2, tokens=5)], [(0, 20)])
    assert expected.of(make_prompt(1, 3, tokens=9)) == 36


def test_only_the_last_batches_count() -> None:
    expected = ResponseLengthEstimator()
    expected.learn([make_prompt(0, 2)], [(0, 1000)])
    for _ in range(WINDOW):
        expected.learn([make_prompt(0, 2)], [(0, 10)])
    assert expected.of(make_prompt(1, 2)) == 10


@pytest.mark.parametrize("engines", [1, 2, 4])
def test_shares_have_equal_numbers_and_nearly_equal_lengths(engines: int) -> None:
    prompts = [make_prompt(number, terms) for number, terms in enumerate([2, 2, 3, 3, 4, 4, 5, 5] * 2)]
    expected = ResponseLengthEstimator()
    expected.learn(prompts, [(prompt.id, 10 * len(prompt.metadata["entry"]["terms"])) for prompt in prompts])
    shares = deal(prompts, expected, engines)
    assert sorted(prompt.id for share in shares for prompt in share) == [prompt.id for prompt in prompts]
    assert {len(share) for share in shares} == {len(prompts) // engines}
    loads = [sum(expected.of(prompt) for prompt in share) for share in shares]
    assert max(loads) <= 1.2 * min(loads)
    assert all([p.id for p in share] == sorted(p.id for p in share) for share in shares)
    assert deal(prompts, expected, engines) == shares


def test_lengths_from_disk_are_those_of_the_run(tmp_path: Path) -> None:
    rows = [make_rollout(prompt, sample) for prompt in (3, 4) for sample in range(2)]
    write_rollouts(rollout_path(tmp_path, 0, 0), rows[:2])
    write_rollouts(rollout_path(tmp_path, 0, 1), rows[2:])
    found = stored_lengths(tmp_path / "step=000000")
    assert found == [(row.prompt_id, len(row.response_tokens)) for row in rows]


def make_rollout(prompt: int, sample: int) -> Rollout:
    tokens = [1] * (prompt + sample)
    return Rollout(0, 0, prompt, sample, 0, 0, 0, [1], tokens, [0.0] * len(tokens), "", "", "stop")
