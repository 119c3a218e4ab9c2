"""Joining a process group that something else formed."""

from __future__ import annotations

import os
import subprocess
import sys

from specrl.config import ClusterConfig

GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PROGRAM = """
import os
import torch.distributed as dist
from specrl.distributed import join
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks = join()
print(ranks.rank, ranks.world_size, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])
"""


def test_a_group_formed_without_the_environment_is_joined_and_told_to_vllm() -> None:
    """vLLM reads RANK where the group exists already; without it, an engine beside a foreign group did not start."""
    environment = {name: value for name, value in os.environ.items() if name not in GROUP}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.split() == ["0", "1", "0", "1", "0"], done.stderr


LIMITS = """
import torch
import torch.distributed as dist
from specrl.distributed import join
from specrl.training.megatron import parallel
from megatron.core import parallel_state

join()
parallel.set_up(1, 1, 1, 0)
for group in (dist.group.WORLD, parallel_state.get_data_parallel_group()):
    print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
"""


def test_ranks_wait_for_each_other_longer_than_any_limit_of_the_job() -> None:
    """What ends a hang is the job's own limit. Mutation: gloo's half hour, below `cluster.start_minutes`."""
    environment = {name: value for name, value in os.environ.items() if name not in GROUP}
    command = [sys.executable, "-c", LIMITS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    limit = 60 * ClusterConfig().start_minutes
    assert [float(seconds) > 24 * limit for seconds in done.stdout.split()] == [True, True]


SHAPES = """
import ctypes
import torch
from specrl.distributed import join

class AllocatorState(ctypes.Structure):
    _fields_ = [(f"field_{i}", ctypes.c_size_t) for i in range(10)]

def allocated():
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = AllocatorState
    return library.mallinfo2().field_7 / 2**20

join()
weight = torch.zeros(64, 64, dtype=torch.bfloat16)
for rows in range(1, 500):
    torch.nn.functional.linear(torch.zeros(rows, 64, dtype=torch.bfloat16), weight)
    if rows == 300:
        before = allocated()
print(allocated() - before)
"""


def test_products_of_ever_new_shapes_do_not_fill_the_memory() -> None:
    """Each would leave half a megabyte of compiled code: a rank grew by some 100 MB a step."""
    environment = {name: value for name, value in os.environ.items() if name not in GROUP}
    done = subprocess.run(
        [sys.executable, "-c", SHAPES], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 20  # MB for 200 shapes; 100 without the limit
