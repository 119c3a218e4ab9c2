"""What is replaced in vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WARM_UP = """
import os, time
from pathlib import Path
from specrl.rollout.vllm.engine.patches import first_on_its_node

def warm_up(model, max_tokens):
    cache = Path(os.environ["DG_JIT_CACHE_DIR"])
    if not (cache / "kernel").exists():
        with (cache / "compiled-by").open("a") as file:
            file.write(os.environ["RANK"])
        time.sleep(1)
        if os.environ["RANK"] == FAILING:
            raise RuntimeError("nvcc failed")
        (cache / "kernel").touch()

first_on_its_node(warm_up)("model", 8)
"""


@pytest.mark.parametrize("failing", [False, True])
def test_kernels_are_compiled_by_the_first_rank_of_a_node(failing: bool, tmp_path: Path) -> None:
    text = WARM_UP.replace("FAILING", repr("4") if failing else "None")
    place = {"DG_JIT_CACHE_DIR": str(tmp_path), "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", text], env={**os.environ, **place, "RANK": rank}, stderr=subprocess.PIPE
        )
        for rank in "7654"  # of the second node
    ]
    codes = [rank.wait(120) for rank in ranks]
    for rank in ranks:
        rank.communicate()
    compiled_by = (tmp_path / "compiled-by").read_text()
    assert compiled_by[0] == "4"
    assert (compiled_by == "4", codes) == ((False, [0, 0, 0, 1]) if failing else (True, [0, 0, 0, 0]))


TWO_ENGINES = """
import gc, weakref
from types import SimpleNamespace
import specrl.rollout.vllm.cpu_kernels  # must precede vllm
import torch
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker import workspace
from specrl.rollout.vllm.engine import lifecycle

class Started:
    engine_core = SimpleNamespace(_finalizer=SimpleNamespace(detach=lambda: None))

def from_engine_args(arguments):
    workspace.init_workspace_manager(torch.device("cpu"))  # as vLLM's workers do on GPUs
    return Started()

LLMEngine.from_engine_args = from_engine_args
first = lifecycle.start({})
memory = weakref.ref(workspace.current_workspace_manager()._ensure_workspace_size(8))
second = lifecycle.start({})
gc.collect()
print(memory() is not None)
"""


@pytest.mark.engine
def test_memory_that_graphs_of_an_engine_write_to_outlives_the_start_of_another() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_ENGINES], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr[-2000:]
