"""The section on sleep: what a sleeping engine gives back, how long it takes, and that refits afterwards arrive."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from specrl.bench.gpu.exactness import MAX_LENGTH, K, mixed_requests
from specrl.bench.gpu.findings import Findings
from specrl.bench.gpu.models import Scale, bench_config, write_drafter, write_sharp
from specrl.rollout.engine import Engine
from specrl.rollout.vllm.weights.load import read_weights

CYCLES = 3
GIB = 2**30


def measure(scale: Scale, folder: Path) -> Findings:
    """Let an engine sleep and wake, refit it, and compare what it then samples with what it sampled before."""
    del scale
    policy = write_sharp(folder / "asleep-policy", "float32", MAX_LENGTH)
    drafter = write_drafter(folder / "asleep-drafter", policy)
    config = bench_config(
        policy,
        MAX_LENGTH,
        model={"dtype": "float32"},
        speculation={"method": "eagle3", "k": K, "adaptive": False},
        engine={"sleep": True, "gpu_memory_fraction": 0.5, "max_num_seqs": 64},
    )
    found = Findings()
    columns = ("cycle", ">free awake, GiB", ">free asleep, GiB", ">sleep, s", ">wake, s", ">refit, s", "same tokens")
    table = found.table("Sleep, wake and refit in turn", columns)
    engine = Engine(policy, drafter, config=config, seed=0)
    requests = mixed_requests(16)
    before = [response.tokens for response in engine.generate(requests).responses]
    same = []
    for cycle in range(1, CYCLES + 1):
        awake = _free()
        slept, asleep = _timed(engine.sleep), _free()
        woke = _timed(engine.wake)
        refit = engine.refit(read_weights(policy), read_weights(drafter), cycle)
        same.append([response.tokens for response in engine.generate(requests).responses] == before)
        seconds = (f"{value:.2f}" for value in (slept, woke, refit))
        table.add(cycle, f"{awake:.1f}", f"{asleep:.1f}", *seconds, "yes" if same[-1] else "NO")
    engine.shutdown()
    found.figures = {"same_tokens": all(same), "cycles": CYCLES}
    return found


def _timed(work: object) -> float:
    assert callable(work)
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _free() -> float:
    return torch.cuda.mem_get_info()[0] / GIB
