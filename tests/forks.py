"""Ranks that are forked from a process of their own, which imports everything once, as that takes longer than most."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from specrl.processes import free_port, importing
from specrl.rollout.vllm.engine.lifecycle import set_environment

ROOT = Path(__file__).parents[1]
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def outside_of_engines() -> dict[str, str]:
    """The environment as users have it: without the group and the variables of engines that were in this process."""
    return {name: value for name, value in os.environ.items() if name not in GROUP and not name.startswith("VLLM_")}


def run_module(module: str, *arguments: object, seconds: float = 1200) -> None:
    """Run `python -m MODULE ARGUMENTS`; it must end well."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = {**outside_of_engines(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def import_engine() -> None:
    """Import what an engine on CPUs needs, for the processes that are forked from this one."""
    set_environment()
    with importing():
        for module in ("vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"):
            import_module(module)


def fork(size: int, run: Callable[[int], object]) -> list[int]:
    """Fork the ranks of a job, each of which calls `run` with its number; return their process ids."""
    port, processes = free_port(), []
    gc.freeze()  # so that no rank copies what it only searches for garbage
    for rank in range(size):
        if (process := os.fork()) == 0:
            code = 1
            try:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
                os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
                run(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        processes.append(process)
    return processes


def wait(processes: list[int]) -> None:
    """Until all have ended, which must be well; when one fails the others, which may wait for it, are killed."""
    codes: dict[int, int] = {}
    while running := set(processes) - codes.keys():
        process, status = os.wait()
        codes[process] = os.waitstatus_to_exitcode(status)
        if codes[process]:
            for other in running - {process}:
                os.kill(other, signal.SIGKILL)
    assert not any(codes.values()), codes
