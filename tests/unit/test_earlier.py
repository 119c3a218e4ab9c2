"""What is kept of earlier epochs: the newest responses to each prompt, within a bound, and the same after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl.rollout.bubbles.texts import PER_PROMPT, EarlierResponses
from specrl.schemas import Rollout, merge_ranks, rollout_path, write_rollouts


def rollouts(step: int, prompt_ids: list[int], samples: int = 2, length: int = 3, rank: int = 0) -> list[Rollout]:
    return [
        Rollout(
            step, rank, prompt, sample, step, 0, 100 * step + sample, [1], [step] * length, [0.0] * length, "", "", ""
        )
        for prompt in prompt_ids
        for sample in range(samples)
    ]


def kept(earlier: EarlierResponses, prompt_ids: range = range(20)) -> list[tuple[int, int, list[int]]]:
    return [(text.prompt_id, text.seed, list(text.tokens)) for text in earlier.to(prompt_ids)]


def test_the_newest_responses_to_a_prompt_take_the_place_of_older_ones() -> None:
    earlier = EarlierResponses()
    earlier.add([1, 2], rollouts(0, [1, 2]))
    earlier.add([2, 3], rollouts(1, [2, 3], samples=PER_PROMPT + 3))
    assert kept(earlier, range(1, 3)) == [
        (1, 0, [0] * 3),
        (1, 1, [0] * 3),
        *((2, 100 + sample, [1] * 3) for sample in range(PER_PROMPT)),
    ]
    assert kept(earlier, range(4, 9)) == []
    earlier.add([1, 4], rollouts(2, [4]))  # another engine has answered the first prompt
    assert kept(earlier, range(1, 2)) == []


def test_prompts_that_were_answered_longest_ago_are_dropped() -> None:
    earlier = EarlierResponses(most_tokens=18)
    for step, prompts in enumerate([[1, 2], [1], [3], [4]]):
        earlier.add(prompts, rollouts(step, prompts))
        assert len(kept(earlier)) * 3 <= 18
    assert [prompt for prompt, *_ in kept(earlier)] == [1, 1, 3, 3, 4, 4]


def test_a_restart_finds_what_an_undisturbed_run_holds(tmp_path: Path) -> None:
    steps = [[1, 2], [3, 4], [2, 3], [4, 1], [5, 2]]
    for bound in (18, 100):
        undisturbed, restored = EarlierResponses(bound), EarlierResponses(bound)
        for step, prompts in enumerate(steps):
            undisturbed.add(prompts, rollouts(step, prompts))
            write_rollouts(rollout_path(tmp_path, step, 0), rollouts(step, prompts))
        write_rollouts(rollout_path(tmp_path, 5, 0), rollouts(5, [1, 2, 3]))  # of a step that is redone
        restored.restore(tmp_path, 5, 0, 1)
        assert kept(restored) == kept(undisturbed)
        for earlier in (undisturbed, restored):
            earlier.add([7], rollouts(6, [7]))
        assert kept(restored) == kept(undisturbed)


@pytest.mark.parametrize("merged", [False, True])
def test_engines_share_the_files_and_hold_what_none_has_answered_since(tmp_path: Path, merged: bool) -> None:
    answered = [{0: [0], 1: [1], 2: [2]}, {0: [3], 1: [0]}, {0: [4], 1: [1]}]
    for step, by_rank in enumerate(answered):
        for rank, prompts in by_rank.items():
            write_rollouts(rollout_path(tmp_path, step, rank), rollouts(step, prompts, rank=rank))
        if merged:
            merge_ranks(rollout_path(tmp_path, step, 0).parent)
    engines = [EarlierResponses(), EarlierResponses()]
    for number, engine in enumerate(engines):
        engine.restore(tmp_path, 3, number, 2)
    found = [{(prompt, tokens[0]) for prompt, _, tokens in kept(engine)} for engine in engines]
    assert found == [{(2, 0), (3, 1), (4, 2)}, {(0, 1), (1, 2)}]
