"""Joining a process group that something else formed."""

from __future__ import annotations

import os
import subprocess
import sys

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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["0", "1", "0", "1", "0"], done.stderr
