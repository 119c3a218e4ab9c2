"""An engine over two ranks is one over a single rank in all but its memory: tokens, refits, comparisons (FP32)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.forks import run_module

pytestmark = pytest.mark.engine
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    folder = tmp_path_factory.mktemp("engines")
    run_module("tests.integration.tensor_parallel_worker", folder)
    names = {"alone": 1, "both": 2}
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(size)]
        for name, size in names.items()
    }


@pytest.mark.parametrize("when", ["before", "after"])
def test_tokens_are_those_of_one_rank_before_and_after_a_refit(found: dict[str, list[Found]], when: str) -> None:
    alone, (first, second) = found["alone"][0][when], (rank[when] for rank in found["both"])
    assert first == second
    assert first["tokens"] == alone["tokens"]
    assert first["accepted"] == alone["accepted"] > 20
    for key in ("logprobs", "sequences"):
        for row, expected in zip(first[key], alone[key], strict=True):
            assert row == pytest.approx(expected, abs=1e-4)
    assert found["alone"][0]["before"]["tokens"] != found["alone"][0]["after"]["tokens"]


def test_a_part_of_the_policy_that_differs_is_named_by_the_rank_that_holds_it(found: dict[str, list[Found]]) -> None:
    assert [rank["compares"] for rank in found["both"]] == [True, True]
    for rank, other in enumerate(found["both"]):
        for case, error in other["damages"].items():
            name, _, half = case.partition(" ")
            if int(half) == rank:
                assert error.startswith("PolicyParityError") and name in error
            else:
                assert error == "", (rank, case)
    assert all(error.startswith("PolicyParityError") for error in found["alone"][0]["damages"].values())


def test_a_drafter_damaged_on_one_rank_is_replaced_on_all(found: dict[str, list[Found]]) -> None:
    first, second = (rank["guard"] for rank in found["both"])
    assert first == second
    assert first[:3] == [False, True, True]
    assert "differs from the trainer's in midlayer.self_attn.q_proj.weight" in first[3]
    assert found["alone"][0]["guard"] == first


def test_the_ranks_of_an_engine_decide_alike(found: dict[str, list[Found]]) -> None:
    assert [rank["is_first"] for rank in found["both"]] == [True, False]
    assert [rank["agreed"] for rank in found["both"]] == [[1, 2**50, True]] * 2
    assert [rank["stopped"] for rank in found["both"]] == [found["alone"][0]["stopped"]] * 2
    assert all("cannot sleep" in rank["sleep"] for ranks in found.values() for rank in ranks)
