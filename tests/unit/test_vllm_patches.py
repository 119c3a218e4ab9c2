"""What is replaced in vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Event, Thread
from types import ModuleType

import pytest

from specrl.rollout.vllm.engine.patches import own_modules


@pytest.fixture
def importing() -> Iterator[None]:
    """Another thread, which gets its turn after every few instructions, adds modules, and takes them away again."""

    def import_modules() -> None:
        for number in count():
            if done.is_set():
                return
            sys.modules[f"imported_{number % 1000}"] = ModuleType("imported")
            if number % 1000 == 999:
                forget()

    def forget() -> None:
        for name in [name for name in list(sys.modules) if name.startswith("imported_")]:
            del sys.modules[name]

    done, interval = Event(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = Thread(target=import_modules)
    thread.start()
    yield
    done.set()
    thread.join()
    sys.setswitchinterval(interval)
    forget()


def test_vllms_modules_are_listed_while_another_thread_imports(importing: None) -> None:
    for _ in range(50):
        assert all(name.partition(".")[0] == "vllm" for name in own_modules.modules)


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
