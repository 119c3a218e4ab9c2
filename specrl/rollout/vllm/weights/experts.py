"""The weights of experts inside the engine: packed anew at each refit, and compared with the trainer's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PARTS = ("gate_proj", "up_proj", "down_proj")
"""The matrices of one expert, in the order that `expected_output` expects."""
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
"""The name of an expert's matrix in checkpoints."""
EXPERTS_TOGETHER = 16
"""The number of experts whose outputs are computed at once; with a few rows for each there are as many as in a small
batch."""
NEVER = -1e4
"""The router's logit for an expert that must not be chosen."""


def pack_anew(model: nn.Module) -> None:
    """Make the next reload pack the experts of a CPU engine as at its start.

    vLLM packs them when it sets up their kernel, and a reload keeps the kernel: the weights would stay unpacked, and
    the kernel would read them as packed ones without any error.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    if torch.cuda.is_available():
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


@torch.inference_mode()
def outputs_of_experts(layer: Any, inputs: Tensor) -> Tensor:
    """Compute each of the engine's experts on the same inputs: [n, hidden] -> [experts, n, hidden].

    With tensor parallelism it is this rank's part of a sum.
    """
    numbers = torch.arange(layer.global_num_experts)
    found = [_outputs(layer, some, inputs) for some in torch.split(numbers, EXPERTS_TOGETHER)]
    return torch.cat(found)


def _outputs(layer: Any, numbers: Tensor, inputs: Tensor) -> Tensor:
    chosen, method = numbers.repeat_interleave(len(inputs))[:, None], layer.quant_method
    rows = inputs.repeat(len(numbers), 1)
    if method.is_monolithic:  # the kernel itself routes
        logits = rows.new_full((len(rows), layer.global_num_experts), NEVER)
        logits.scatter_(1, chosen.to(rows.device), 0.0)
        # The routing sink records choices for the tokens of an iteration, and there is none now.
        sink, layer.routing_sink = layer.routing_sink, None
        try:
            output: Tensor = method.apply_monolithic(layer, rows, logits)
        finally:
            layer.routing_sink = sink
    else:
        ids = (chosen + torch.arange(layer.top_k)).int() % layer.global_num_experts
        gates = torch.eye(1, layer.top_k).expand(len(rows), -1).contiguous()
        output = method.apply(layer, rows, gates.to(rows.device), ids.to(rows.device), None, None)
    return output.view(len(numbers), *inputs.shape)


def expected_output(layer: Any, matrices: Sequence[Tensor], inputs: Tensor) -> Tensor:
    """The expected output of one of the engine's experts: [n, hidden] -> float32 [n, hidden].

    With tensor parallelism it is this rank's part of a sum.

    Args:
        matrices: The expert's gate and up projection [width, hidden] and down projection [hidden, width], whole.
    """
    rank, size = layer.moe_config.tp_rank, layer.moe_config.tp_size
    own = [*(matrix.chunk(size)[rank] for matrix in matrices[:2]), matrices[2].chunk(size, dim=1)[rank]]
    method = layer.quant_method
    if hasattr(method, "quantise_inputs"):
        own = [method.quantise_matrix(matrix) for matrix in own]
        inputs = method.quantise_inputs(inputs)
    gates, ups = (inputs.float() @ matrix.float().T for matrix in own[:2])
    inner = (F.silu(gates) * ups).to(inputs.dtype)
    if hasattr(method, "quantise_inputs"):
        inner = method.quantise_inputs(inner)
    output: Tensor = inner.float() @ own[2].float().T
    return output
