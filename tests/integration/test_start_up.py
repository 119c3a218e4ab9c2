"""What the start of a job takes of each of eight ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import start_up_worker as worker
from safetensors.torch import load_file

from specrl.config import ModelConfig, TinyModelConfig
from specrl.models.families import LLAMA
from specrl.models.tiny import write_tiny_model
from specrl.precision.recipe import Recipe, write_recipe
from specrl.projection.refit import Layout
from specrl.projection.start_up import rank_groups, start_up


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start-up") / "policy"
    tiny = TinyModelConfig(num_layers=6, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2)
    write_tiny_model(ModelConfig(source="tiny", dtype="float32", tiny=tiny), 0, folder)
    write_recipe(folder.parent / "scales.json", Recipe(LLAMA, 6), folder)
    return folder


def test_eight_ranks_read_each_weight_once_in_few_groups_that_connect_when_used(policy: Path) -> None:
    found = worker.start_all(policy.parent)
    layout = Layout(**worker.LAYOUT)
    size = sum(tensor.nbytes for tensor in load_file(policy / "model.safetensors").values())
    cost = start_up(worker.RANKS, layout, size)

    assert [rank["hashed"] for rank in found] == [1, 1] + [0] * 6  # the weights and the configuration
    assert found[0]["bytes"] == pytest.approx(cost.bytes_read, rel=0.2)
    assert sum(rank["bytes"] for rank in found) == pytest.approx(size, rel=0.1)  # norms and tied embeddings twice
    assert [rank["bytes"] > 0 for rank in found] == [True, True, False, False] * 2  # two data-parallel replicas

    assert set(found[0]["groups"]) == set(rank_groups(worker.RANKS, layout))
    assert len(found[0]["groups"]) == cost.groups - 1
    assert max(rank["connections"] for rank in found) < cost.pairs
    for rank, counted in enumerate(found):
        print(f"rank {rank}: {len(counted['groups']) + 1} groups, {counted['connections']} connections,", end=" ")
        print(f"{counted['bytes']} of {size} bytes read, {counted['hashed']} files hashed")
