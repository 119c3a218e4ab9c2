"""Rollouts keep tokens and log-probs as arrays, in memory and on disk."""

from __future__ import annotations

from array import array
from pathlib import Path

from specrl.schemas import Rollout, read_rollouts, write_rollouts


def test_rollouts_are_what_was_written_without_an_object_for_each_number(tmp_path: Path) -> None:
    common = (0, 1, 2, 3, 4, 5, 2**62, [7, 8])
    rollouts = [
        Rollout(*common, [3, 4, 150_000], [-0.5, -0.25, -1.0], "x", "y", "stop", log_kept_mass=[-1.0, 0.0, -0.1]),
        Rollout(*common, [], [], "", "", "length", policy_logprobs=[]),
        Rollout(*common, [1], [-3.0], "é", "y", "stop", policy_logprobs=[-2.0], reward=0.5),
    ]
    write_rollouts(tmp_path / "rollouts.arrow", rollouts)
    found = read_rollouts(tmp_path / "rollouts.arrow")
    assert found == rollouts
    assert [rollout.policy_logprobs is None for rollout in found] == [True, False, False]
    for rollout in (*found, *rollouts):
        assert isinstance(rollout.response_tokens, array) and rollout.response_tokens.itemsize == 4
        assert isinstance(rollout.generation_logprobs, array) and rollout.generation_logprobs.typecode == "f"
    assert list(found[0].whole_generation_logprobs) == list(array("f", [-1.5, -0.25, -1.1]))
