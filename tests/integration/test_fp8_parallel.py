"""Emulated FP8 and its calibration on tensor and pipeline shards: the same numbers as on one rank.

Sizes are such that shard boundaries are block boundaries; elsewhere each shard has blocks of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specrl.models.families import LLAMA
from specrl.precision.recipe import layer_names
from tests.forks import run_module
from tests.integration.fp8_worker import LAYOUTS, MAX_KL, NUM_LAYERS, make_model


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    scratch = tmp_path_factory.mktemp("fp8")
    make_model(scratch / "model")
    run_module("tests.integration.fp8_worker", scratch)
    return {
        layout: [torch.load(scratch / f"{layout}-{rank}.pt", weights_only=False) for rank in range(world)]
        for layout, (world, _, _) in LAYOUTS.items()
    }


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_fp8_training_is_the_same_on_shards(results: dict[str, list[dict[str, Any]]], layout: str) -> None:
    (alone,) = results["alone"]
    for found in results[layout]:
        for key in ("loss", "grad_norm"):
            values, expected = ([step[key] for step in steps] for steps in (found["steps"], alone["steps"]))
            assert values == pytest.approx(expected, rel=1e-2)
    assert alone["steps"][0]["grad_norm"] != pytest.approx(alone["plain"][0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_scales_of_a_kv_cache_are_the_same_on_shards_that_recompute(
    results: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    """With pipeline parallelism other micro-batches pass between a forward pass and its recomputation."""
    expected = results["alone"][0]["kv"]
    for found in (rank["kv"] for rank in results[layout]):
        for letter in "qkv" if layout == "pipeline" else "":
            assert getattr(found, letter) == getattr(expected, letter)
        assert [max(found.k), max(found.v)] == pytest.approx([max(expected.k), max(expected.v)], rel=0.05)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_every_shard_is_quantised(results: dict[str, list[dict[str, Any]]], layout: str) -> None:
    names = [set(found["linears"]) for found in results[layout]]
    assert set.union(*names) == set(layer_names(LLAMA, NUM_LAYERS)) - {"layers.1.linear_fc2"}
    if layout == "pipeline":
        assert not names[0] & names[1]


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_calibration_is_the_same_on_shards(results: dict[str, list[dict[str, Any]]], layout: str) -> None:
    expected = results["alone"][0]["calibration"]
    assert 0 < expected.kl_chosen <= MAX_KL < expected.kl_all_fp8
    for found in (rank["calibration"] for rank in results[layout]):
        assert found.kl_all_fp8 == pytest.approx(expected.kl_all_fp8, rel=0.1)
        assert 0 < found.kl_chosen <= MAX_KL
        for row, other in zip(found.rows, expected.rows, strict=True):
            assert (row.name, row.flops_per_token) == (other.name, other.flops_per_token)
    assert results[layout][0]["calibration"] == results[layout][1]["calibration"]
