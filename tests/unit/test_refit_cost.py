"""What a refit of large models costs, without a model."""

from __future__ import annotations

import pytest

from specrl.config import PolicyConfig
from specrl.models.families import FAMILIES
from specrl.models.shapes import KNOWN_SHAPES, ModelShape
from specrl.projection.traffic import refit_cost

EXPERTS = ModelShape(FAMILIES["qwen3"], 96, 4096, 12288, 64, 4, 128, 151936, False, 40960, 128, 8, 1536)
"""A Qwen3-235B-A22B with two layers more, which four stages divide."""


@pytest.mark.parametrize(
    ("shape", "policy", "seconds"),
    [
        (KNOWN_SHAPES["Qwen/Qwen3-8B"], PolicyConfig(tensor_parallel=4), 0.027),
        (KNOWN_SHAPES["Qwen/Qwen3-32B"], PolicyConfig(tensor_parallel=8, pipeline_parallel=2), 0.29),
        (EXPERTS, PolicyConfig(tensor_parallel=8, pipeline_parallel=4, expert_parallel=8), 2.14),
    ],
    ids=["8B", "32B", "235B"],
)
def test_a_gpu_receives_its_part_over_the_network_and_the_rest_inside_its_node(
    shape: ModelShape, policy: PolicyConfig, seconds: float
) -> None:
    cost = refit_cost(shape, policy)
    model, ranks, stages = 2 * shape.parameters, policy.tensor_parallel, policy.pipeline_parallel
    assert cost.sent_bytes == pytest.approx(model / ranks if stages > 1 else 0, rel=0.01)
    assert cost.stage_bytes == pytest.approx(model / ranks * (1 - 1 / stages), rel=0.12)
    assert cost.rank_bytes == pytest.approx(model * (1 - 1 / ranks), rel=0.01)
    assert cost.seconds(between_stages=50e9, inside=450e9) == pytest.approx(seconds, rel=0.02)


def test_one_rank_sends_nothing() -> None:
    cost = refit_cost(KNOWN_SHAPES["Qwen/Qwen3-8B"], PolicyConfig())
    assert (cost.stage_bytes, cost.rank_bytes, cost.sent_bytes) == (0, 0, 0)
