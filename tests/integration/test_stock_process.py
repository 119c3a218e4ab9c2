"""Stock vLLM, in a process of its own: it generates what it is asked for, and nothing of it is left behind."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from specrl.bench import stock
from specrl.bench.stock import StockEngine, StockError
from specrl.config import parse_config
from specrl.rollout.requests import Request
from tests.exactness.toy import policy_weights, write_policy

pytestmark = pytest.mark.engine


def cpu_seconds(session: int) -> float:
    """The CPU time that all living processes of a session have taken so far, in seconds; 0 if there are none."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_an_engine_that_hangs_is_ended_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_policy(tmp_path / "policy", policy_weights(0))
    model = {"source": "tiny", "dtype": "float32", "max_length": 192}
    config = parse_config({"name": "default", "model": model, "engine": {"kv_cache_gib": 0.0625}})
    engine = StockEngine(tmp_path / "policy", config, tmp_path / "log")
    requests = [Request([5, 6, 7], seed, 10, 1.0, 1.0) for seed in range(5)]
    assert len(engine.generate(requests, batch=2)) == 3
    before = cpu_seconds(engine._process.pid)
    time.sleep(0.5)
    assert 0 < before <= cpu_seconds(engine._process.pid) < before + 0.25, "nothing of it runs beside what comes next"
    processes = [engine._process.pid, *(child.pid for child in psutil.Process(engine._process.pid).children(True))]
    assert len(processes) > 1, "vLLM has started processes of its own"
    monkeypatch.setattr(stock, "ANSWER_SECONDS", 1)
    psutil.Process(engine._process.pid).suspend()
    with pytest.raises(StockError, match=r"gave no answer within 1 s"):
        engine.generate(requests, batch=5)
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=120)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
