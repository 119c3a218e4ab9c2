"""The weights of experts inside the engine: packed anew at each refit, and compared with the trainer's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PARTS = ("gate_proj", "up_proj", "down_proj")
"""The matrices of one expert, in the order in which `computes_with_expert` wants them."""
EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
"""The name of a matrix of an expert, as checkpoints have it."""
NEVER = -1e4
"""The router's logit of an expert that is not to be chosen."""


def pack_anew(model: nn.Module) -> None:
    """Let the next reload pack the experts of a CPU engine as its start did.

    vLLM packs them when it sets up their kernel, and a reload keeps the kernel: the weights would stay as they arrive,
    and the kernel would read them as packed ones, without any error.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def computes_with_expert(layer: Any, expert: int, matrices: Sequence[Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the engine computes with one expert, and what it should compute, float32 [n, hidden] on the CPU.

    With tensor parallelism both are this rank's part of a sum.

    Args:
        layer: The engine's `RoutedExperts`.
        expert: The number of the expert.
        matrices: The expert's gate and up projection [width, hidden] and down projection [hidden, width], whole.
        inputs: [n, hidden] in the compute type.
    """
    rank, size = layer.moe_config.tp_rank, layer.moe_config.tp_size
    gate, up = (matrix.chunk(size)[rank] for matrix in matrices[:2])
    down = matrices[2].chunk(size, dim=1)[rank]
    return _output(layer, expert, inputs.to(gate.device)).float().cpu(), _expected(layer, gate, up, down, inputs)


@torch.inference_mode()
def _output(layer: Any, expert: int, inputs: Tensor) -> Tensor:
    """Return the output of the layer for tokens that are all sent to one expert: [n, hidden] -> [n, hidden]."""
    rows, method = len(inputs), layer.quant_method
    if method.is_monolithic:  # the kernel routes by itself
        logits = inputs.new_full((rows, layer.global_num_experts), NEVER)
        logits[:, expert] = 0.0
        # What a kernel tells of its choice is for the tokens of an iteration, and there is none.
        sink, layer.routing_sink = layer.routing_sink, None
        try:
            chosen: Tensor = method.apply_monolithic(layer, inputs, logits)
        finally:
            layer.routing_sink = sink
        return chosen
    order = torch.arange(expert, expert + layer.top_k, dtype=torch.int32) % layer.global_num_experts
    first = torch.eye(1, layer.top_k, dtype=torch.float32)
    ids, gates = (row.expand(rows, -1).contiguous().to(inputs.device) for row in (order, first))
    output: Tensor = method.apply(layer, inputs, gates, ids, None, None)
    return output


def _expected(layer: Any, gate: Tensor, up: Tensor, down: Tensor, inputs: Tensor) -> Tensor:
    method = layer.quant_method
    matrices = [matrix.cpu() for matrix in (gate, up, down)]
    if hasattr(method, "quantise_inputs"):
        matrices = [method.quantise_matrix(matrix) for matrix in matrices]
        inputs = method.quantise_inputs(inputs)
    gates, ups = (inputs.float() @ matrix.float().T for matrix in matrices[:2])
    inner = (F.silu(gates) * ups).to(inputs.dtype)
    if hasattr(method, "quantise_inputs"):
        inner = method.quantise_inputs(inner)
    return inner.float() @ matrices[2].float().T
