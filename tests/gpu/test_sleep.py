"""Tests of an engine that sleeps between rollouts, on a real GPU; a machine without one skips them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specrl.config import EngineConfig
from tests.exactness.engines import mixed_requests, running
from tests.exactness.toy import drafter_weights, policy_weights, toy_config, write_drafter, write_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: no sleep")]


def test_a_sleeping_engine_gives_memory_back_and_samples_the_same_afterwards(tmp_path: Path) -> None:
    weights, drafter = policy_weights(0), drafter_weights(1)
    directories = write_policy(tmp_path / "policy", weights), write_drafter(tmp_path / "drafter", drafter)
    config = toy_config("eagle3", 3)
    asleep = config.model_copy(update={"engine": EngineConfig(sleep=True, gpu_memory_fraction=0.3)})
    with running(*directories, asleep) as engine:
        before = [response.tokens for response in engine.generate(mixed_requests(8)).responses]
        awake_free, _ = torch.cuda.mem_get_info()
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > awake_free + 2**30  # its KV cache alone is more
        engine.wake()
        engine.refit(weights.items(), drafter.items())
        assert [response.tokens for response in engine.generate(mixed_requests(8)).responses] == before
