"""How stock vLLM is started: with nothing of this project's in its environment or its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specrl.bench.gpu.generation import RATES, K
from specrl.bench.stock import StockEngine, StockError, gpu_share, stock_arguments, stock_environment
from specrl.config import Config, EngineConfig
from specrl.distributed import VARIABLES
from specrl.processes import start_helper
from specrl.rollout.requests import Request
from specrl.rollout.vllm.engine.arguments import BATCH_INVARIANT, ENVIRONMENT


def test_it_chooses_its_own_scheduler_and_sampler() -> None:
    config = Config(name="default", engine=EngineConfig(max_num_seqs=7))
    on_gpu = stock_arguments(Path("policy"), config, 0.4)
    assert not {"max_num_seqs", "async_scheduling", "enforce_eager", "speculative_config"} & set(on_gpu)
    assert on_gpu["gpu_memory_utilization"] == 0.4
    on_cpu = stock_arguments(Path("policy"), config, None)
    assert (on_cpu["kv_cache_memory_bytes"], on_cpu["enforce_eager"]) == (2**30, True)


def test_its_processes_find_no_llvmlite_when_they_start() -> None:
    """vLLM looks through all modules for its kernels then, and fails at llvmlite's library."""
    script = "import specrl.bench.stock_process, sys; assert not {'llvmlite', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_its_environment_is_the_users() -> None:
    ours = {
        **ENVIRONMENT,
        **VARIABLES,
        BATCH_INVARIANT: "1",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "here",
        "HOME": "/home/me",
    }
    theirs = stock_environment(ours)
    assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER", "RANK", "MASTER_ADDR"} & set(theirs)
    assert not {BATCH_INVARIANT, *VARIABLES} & set(theirs)
    assert (theirs["HOME"], theirs["VLLM_NO_USAGE_STATS"]) == ("/home/me", "1")
    chosen = stock_environment({**ours, "VLLM_USE_V2_MODEL_RUNNER": "0"})
    assert chosen["VLLM_USE_V2_MODEL_RUNNER"] == "0"  # what the user has set stands


def test_it_gets_the_memory_that_the_ranks_own_engine_would_or_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(name="default", engine=EngineConfig(gpu_memory_fraction=0.4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (98, 100))
    assert gpu_share(config) == 0.4
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40, 100))
    assert gpu_share(config) == pytest.approx(0.368)


def test_an_engine_that_has_died_is_said_to_have(tmp_path: Path) -> None:
    engine = object.__new__(StockEngine)
    engine._log = tmp_path / "log"
    engine._log.write_text("out of memory\n")
    engine._process, engine._engine = start_helper("specrl.events")  # which is nobody's helper
    os.waitid(os.P_PID, engine._process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(StockError, match="out of memory"):
        engine.generate([Request([1], 0, 1, 1.0)], 1)


def test_made_up_acceptance_has_the_length_that_is_asked_for() -> None:
    for length, rate in RATES.items():
        assert sum(rate**power for power in range(K + 1)) == pytest.approx(length, abs=1e-3)
