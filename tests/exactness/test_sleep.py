"""An engine that sleeps between rollouts, on a CPU: vLLM's own calls, with memory that is lost as a GPU's is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.exactness.engines import mixed_requests, running
from tests.exactness.toy import drafter_weights, policy_weights, toy_config, write_drafter, write_policy

pytestmark = pytest.mark.engine


def test_an_engine_that_slept_twice_samples_the_same_though_its_cache_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, drafter = policy_weights(0), drafter_weights(1)
    directories = write_policy(tmp_path / "policy", weights), write_drafter(tmp_path / "drafter", drafter)
    with running(*directories, toy_config("eagle3", 3)) as engine:
        worker = engine.llm.model_executor.driver_worker.worker

        def lose(level: int) -> None:
            for cache in engine.runner.kv_caches:
                cache.fill_(torch.nan)

        monkeypatch.setattr(engine.llm.model_config, "enable_sleep_mode", True)
        monkeypatch.setattr(worker, "sleep", lose)
        monkeypatch.setattr(worker, "wake_up", lambda tags: None)
        before = [response.tokens for response in engine.generate(mixed_requests(8)).responses]
        for _ in range(2):
            engine.sleep()
            assert engine.llm.is_sleeping()
            engine.wake()
            assert not engine.llm.is_sleeping()
            engine.refit(weights.items(), drafter.items())
            assert [response.tokens for response in engine.generate(mixed_requests(8)).responses] == before
