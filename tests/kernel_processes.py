"""Our Triton kernels without a GPU: run by Triton's interpreter, and compiled for GPUs that are not there.

Both are for processes of their own. Whether a kernel is interpreted is decided when Triton is imported.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor


def use_interpreter() -> None:
    """Have this process interpret Triton kernels; to be called before it imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"


def pick(*arguments: Tensor) -> tuple[Tensor, ...]:
    """Run `specrl.rollout.sampling.kernels.pick`."""
    from specrl.rollout.sampling import kernels

    return tuple(kernels.pick(*arguments))


def verify(*arguments: Any) -> tuple[Tensor, ...]:
    """Run `specrl.rollout.sampling.kernels.verify`."""
    from specrl.rollout.sampling import kernels

    return tuple(kernels.verify(*arguments))


POINTERS = {"logits": "*{dtype}", "top_k": "*i64", "seeds": "*i64", "positions": "*i64", "tokens": "*i64"}
POINTERS |= {
    "sums": "*fp64",
    "whole": "*fp64",
    "is_finite": "*i1",
    "stride": "i32",
    "vocab": "i32",
    "num_blocks": "i32",
}
POINTERS |= dict.fromkeys(["picked", "drafts", "stop_tokens"], "*i64") | {"width": "i32", "num_stops": "i32"}
POINTERS |= dict.fromkeys(["starts", "limits", "counts"], "*i32")
CONSTANTS = {"all_blocks": 256, "bits": 16, "all_columns": 16, "all_stops": 8}


def compiled(capability: int, dtype: str) -> dict[str, tuple[str, int]]:
    """Return the PTX of each kernel for a GPU of this compute capability, and the size of its machine code in bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from specrl.rollout.sampling import kernels

    found = {}
    for kernel in (kernels.sum_blocks, kernels.keep_most_probable, kernels.choose_token, kernels.accept):
        constants: dict[str, Any] = {name: CONSTANTS[name] for name in kernel.arg_names if name in CONSTANTS}
        signature = {name: POINTERS.get(name, "*fp32").format(dtype=dtype) for name in kernel.arg_names}
        signature |= dict.fromkeys(constants, "constexpr")
        if "bits" in constants:
            constants["bits"] = 16 if dtype == "bf16" else 32
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = kernels.WHOLE_ROW if kernel is kernels.keep_most_probable else kernels.OPTIONS
        code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
        found[kernel.__name__] = code["ptx"], len(code["cubin"])
    return found
