"""Rollouts keep tokens and log-probs as arrays, in memory and on disk."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from specrl.schemas import Rollout, merge_ranks, read_folder, read_rollouts, rollout_path, write_rollouts


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


@pytest.mark.parametrize("kill_at", [None, *range(5)])
def test_the_files_of_a_steps_ranks_become_one_whenever_a_kill_comes(
    kill_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        [Rollout(3, rank, 1, n, 3, 3, 9, [7], [n, rank], [-1.0] * 2, "x", "y", "stop") for n in (0, 1)]
        for rank in range(3)
    ]
    for rank, rollouts in enumerate(rows):
        write_rollouts(rollout_path(tmp_path, 3, rank), rollouts)
    calls: list[str] = []

    def kill_instead(name: str) -> None:
        original = getattr(Path, name)

        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.name != ".merged" or name != "unlink":
                calls.append(name)
                if len(calls) - 1 == kill_at:
                    raise KeyboardInterrupt
            return original(path, *arguments, **options)

        patch.setattr(Path, name, call)

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "rename"):
            kill_instead(name)
        if kill_at is None:
            merge_ranks(tmp_path / "step=000003")
        else:
            with pytest.raises(KeyboardInterrupt):
                merge_ranks(tmp_path / "step=000003")
    merge_ranks(tmp_path / "step=000003")
    assert [path.name for path in (tmp_path / "step=000003").iterdir()] == ["rank-0000.arrow"]
    assert list(read_folder(tmp_path)) == [row for rollouts in rows for row in rollouts]
