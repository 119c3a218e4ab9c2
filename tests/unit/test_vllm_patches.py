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
