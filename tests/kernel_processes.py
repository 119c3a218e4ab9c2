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


def run_with_text(*arguments: Any) -> tuple[Any, ...]:
    """Have requests take turns with the Triton kernels, which are checked at every draft; return the counters."""
    from specrl.rollout.drafts.kernels import TritonDrafts
    from tests.text_drafting import Run

    *asked, worth, ghosts = arguments
    run = Run(*asked, "cpu", TritonDrafts)
    run.run(worth, ghosts)
    return tuple(run.drafts.counts())


def iterate_with_text(*arguments: Any) -> list[Tensor]:
    """Run `tests.text_drafting.iterate` with the Triton kernels."""
    from specrl.rollout.drafts.kernels import TritonDrafts
    from tests.text_drafting import iterate

    return iterate(TritonDrafts, *arguments)


POINTERS = {"logits": "*{dtype}", "top_k": "*i64", "seeds": "*i64", "positions": "*i64", "tokens": "*i64"}
POINTERS |= {
    "sums": "*fp64",
    "whole": "*fp64",
    "thresholds": "*i32",
    "stride": "i32",
    "vocab": "i32",
    "num_blocks": "i32",
}
POINTERS |= dict.fromkeys(["picked", "drafts", "stop_tokens"], "*i64") | {"width": "i32", "num_stops": "i32"}
POINTERS |= dict.fromkeys(["starts", "limits", "counts"], "*i32")
WHOLE_ROW = ("keep_most_probable", "pick_tokens")
CONSTANTS = {"all_blocks": 256, "bits": 16, "all_columns": 16, "all_stops": 8}


OF_TEXT = dict.fromkeys(["num_sampled", "lengths", "all_tokens", "text", "sources"], "*i32")
OF_TEXT |= {"draft_lengths": "*i32", "slots": "*i32", "expected": "*fp32", "worth_behind": "*fp32"}
OF_TEXT |= dict.fromkeys(["stride", "num_stops", "k", "num_tokens", "num_keys", "key_steps"], "i32")
OF_TEXT |= dict.fromkeys(["drafter_stride", "passes", "draft_length", "offers"], "i32")


def compiled(capability: int, dtype: str) -> dict[str, tuple[str, int]]:
    """Return the PTX of each kernel for a GPU of this compute capability, and the size of its machine code in bytes."""
    from specrl.rollout.sampling import kernels

    found = {}
    for kernel in (kernels.sum_blocks, kernels.keep_most_probable, kernels.pick_tokens, kernels.accept):
        constants: dict[str, Any] = {name: CONSTANTS[name] for name in kernel.arg_names if name in CONSTANTS}
        signature = {name: POINTERS.get(name, "*fp32").format(dtype=dtype) for name in kernel.arg_names}
        if "bits" in constants:
            constants["bits"] = 16 if dtype == "bf16" else 32
        options = kernels.WHOLE_ROW if kernel.__name__ in WHOLE_ROW else kernels.OPTIONS
        found[kernel.__name__] = machine_code(kernel, signature, constants, capability, options)
    return found


def compiled_for_text(capability: int) -> dict[str, tuple[str, int]]:
    """Return the same of the kernels that draft from text."""
    from specrl.rollout.drafts import kernels

    found = {}
    for kernel in (kernels.compare, kernels.find_drafts):
        signature = {name: OF_TEXT.get(name, "*i64") for name in kernel.arg_names}
        constants = {name: 16 for name in kernel.arg_names if name in ("columns", "all_stops")}
        found[kernel.__name__] = machine_code(kernel, signature, constants, capability, {"num_warps": 1})
    return found


def machine_code(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: int, options: dict[str, Any]
) -> tuple[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
    return code["ptx"], len(code["cubin"])
