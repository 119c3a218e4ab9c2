"""A fingerprint of the weights inside an engine, by which engines find out at little cost whether theirs are equal."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrl.rollout.vllm.load import linear_output


@torch.inference_mode()
def fingerprint(model: nn.Module) -> str:
    """Return a digest of everything that a dense model inside the engine computes with.

    Of a matrix it is the product with a fixed random row, bit for bit, because CPU engines keep only packed matrices;
    of anything else it is the value. Equal weights have equal fingerprints in engines on the same kind of device; other
    devices may round in another way. What differs between two matrices shows unless rounding hides it in all products.

    Args:
        model: The policy's module inside the engine, or this rank's part of it; its experts, if any, do not count.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    digest = blake2b(digest_size=16)
    like = next(model.parameters())
    rows: dict[int, Tensor] = {}

    def row(width: int) -> Tensor:
        if width not in rows:
            rows[width] = torch.randn(1, width, generator=torch.Generator().manual_seed(0)).to(like)
        return rows[width]

    for module in model.modules():
        layer: Any = module
        multiplies = isinstance(layer, (LinearBase, ParallelLMHead))
        if multiplies:
            digest.update(_bytes(linear_output(layer, row(_width(layer)))))
        for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            if name == "weight" and multiplies:
                continue
            is_matrix = name == "weight" and tensor.dim() == 2  # of embeddings
            digest.update(_bytes(F.linear(row(tensor.shape[1]), tensor) if is_matrix else tensor))
    return digest.hexdigest()


def _width(layer: Any) -> int:
    """Return the number of inputs of a linear layer or head, or of this rank's part of it."""
    if hasattr(layer, "embedding_dim"):
        return int(layer.embedding_dim)
    return int(getattr(layer, "input_size_per_partition", layer.input_size))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
