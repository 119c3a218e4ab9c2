"""What the start of a job takes of each of eight ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import start_up_worker as worker
from safetensors.torch import load_file

from specrl.config import ModelConfig, PolicyConfig, TinyModelConfig
from specrl.models.families import FAMILIES
from specrl.models.shapes import model_shape
from specrl.models.tiny import write_tiny_model
from specrl.precision.recipe import Recipe, write_recipe
from specrl.projection.traffic import refit_cost

TINY = TinyModelConfig(family="qwen3_moe", hidden_size=64, num_heads=4, num_kv_heads=2)
MODEL = ModelConfig(source="tiny", dtype="float32", tiny=TINY)
LAYOUT = PolicyConfig(**worker.LAYOUT)


def rank_groups(ranks: int, layout: PolicyConfig) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of each group that Megatron makes for rank 0, once for each purpose of ours.

    Ranks count through tensor-parallel ranks first, then through data-parallel ranks, then through stages.
    """
    tensor, stages, experts = layout.tensor_parallel, layout.pipeline_parallel, layout.expert_parallel
    stage = ranks // stages
    heads = range(0, ranks, stage)  # the first rank of each stage
    yield (0,)
    yield tuple(range(tensor))
    yield tuple(range(0, stage, tensor))  # data parallel
    yield tuple(heads)
    yield (0, heads[-1]) if stages > 1 else (0,)  # embeddings and head
    yield tuple(head + rank for head in heads for rank in range(tensor))
    yield tuple(range(stage))
    yield tuple(range(experts))
    yield tuple(range(0, stage, experts))
    yield tuple(head + rank for head in heads for rank in range(experts))
    yield tuple(range(ranks))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start-up") / "policy"
    write_tiny_model(MODEL, 0, folder)
    write_recipe(folder.parent / "scales.json", Recipe(FAMILIES["qwen3_moe"], TINY.num_layers), folder)
    return folder


@pytest.fixture(scope="module")
def found(policy: Path) -> list[dict[str, Any]]:
    return worker.start_all(policy.parent)


def test_eight_ranks_read_each_weight_once_and_hash_it_once(found: list[dict[str, Any]], policy: Path) -> None:
    size = sum(tensor.nbytes for tensor in load_file(policy / "model.safetensors").values())
    for rank, counted in enumerate(found):
        print(f"rank {rank}: {len(counted['groups']) + 1} groups, {counted['connections']} connections,", end=" ")
        print(f"{counted['bytes']} of {size} bytes read, {counted['hashed']} files hashed")
    assert [rank["hashed"] for rank in found] == [1, 1] + [0] * 6  # the weights and the configuration
    assert found[0]["bytes"] == pytest.approx(size / LAYOUT.tensor_parallel / LAYOUT.pipeline_parallel, rel=0.2)
    assert sum(rank["bytes"] for rank in found) == pytest.approx(size, rel=0.1)  # norms and tied embeddings twice
    assert [rank["bytes"] > 0 for rank in found] == [True, True, False, False] * 2  # two replicas


def test_eight_ranks_make_few_groups_and_connect_when_they_use_them(found: list[dict[str, Any]]) -> None:
    groups = set(rank_groups(worker.RANKS, LAYOUT))
    assert set(found[0]["groups"]) == groups
    assert len(found[0]["groups"]) == len(groups)
    pairs = sum(len(group) - 1 for group in groups) + worker.RANKS - 1  # if gloo connected all at once
    assert max(rank["connections"] for rank in found) < pairs


def test_a_refit_of_experts_sends_what_is_on_disk_and_what_the_plan_says(found: list[dict[str, Any]]) -> None:
    shape = model_shape(MODEL)
    for rank in found:
        assert rank["wrong"] == []
        cost = refit_cost(shape, LAYOUT, element_size=4, stage=rank["stage"])
        traffic = rank["traffic"]
        assert (traffic["stage_bytes"], traffic["rank_bytes"]) == (cost.stage_bytes, cost.rank_bytes)
        assert traffic["peak_bytes"] <= 4 * shape.parameters_per_layer
