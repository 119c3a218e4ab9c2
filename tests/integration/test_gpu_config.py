"""What vLLM makes of the shipped configurations on a GPU, resolved on a platform that is made up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
CONFIGS = sorted(str(path) for path in Path("configs").glob("qwen3-*.toml"))


CUTLASS, DEEP_GEMM = "CutlassFp8BlockScaledMMKernel", "DeepGemmFp8BlockScaledMMKernel"


@pytest.fixture(scope="module", params=["plain", "invariant", "blackwell"])
def resolved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.integration.gpu_config_worker", request.param]
    done = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("models")), *CONFIGS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_every_shipped_configuration_runs_the_second_runner_asynchronously_with_full_graphs(
    resolved: dict[str, Any],
) -> None:
    assert len(resolved) == len(CONFIGS) == 5
    for name, answer in resolved.items():
        assert answer["second_runner"] and answer["asynchronous"], name
        assert answer["full_graphs"] == "FULL", name


def test_only_an_engine_beside_a_trainer_takes_the_allocator_that_serves_one_of_a_process(
    resolved: dict[str, Any],
) -> None:
    assert [answer["sleeps"] for answer in resolved.values()] == [[True, False]] * len(resolved)


def test_every_decoding_batch_of_every_draft_length_has_a_full_graph(resolved: dict[str, Any]) -> None:
    assert {name: answer["without_graph"] for name, answer in resolved.items()} == {name: [] for name in resolved}
    assert all(len(answer["sizes"]) <= 90 for answer in resolved.values())


def test_fp8_takes_kernels_that_multiply_fp8_activations_by_scales_that_are_no_powers_of_two(
    resolved: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """DeepGEMM's for Blackwell take powers of two alone. Attention must read the scales where a refit puts them."""
    is_blackwell = request.node.callspec.params["resolved"] == "blackwell"
    expected = (CUTLASS, "TRITON_ATTN") if is_blackwell else (DEEP_GEMM, "FLASH_ATTN")
    assert {(answer["linear"], answer["attention"]) for answer in resolved.values()} == {expected}
