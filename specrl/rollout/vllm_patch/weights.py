"""Weights of a running engine: loaded in place, and asked what they compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def reload_weights(vllm_config: Any, model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights with on-disk names in place. On CPUs linear weights are packed after loading: each is packed anew.

    A head tied to the embeddings keeps its own packed copy, which a reload leaves as it was: it is packed again too.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    with torch.inference_mode(), set_current_vllm_config(vllm_config):
        inplace.reload_weights(
            vllm_config, model, weights_iterator=weights, weights_path=None, is_checkpoint_format=True
        )
        head, embeddings = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
        if head is not None and embeddings is not None and head.weight is embeddings.weight:
            head.quant_method.process_weights_after_loading(head)


def linear_output(layer: nn.Module, inputs: Tensor) -> Tensor:
    """What a linear layer or head of the engine computes with its packed weight, no bias: [n, in] -> [n, out]."""
    method: Any = layer.quant_method
    with torch.inference_mode():
        output: Tensor = method.apply(layer, inputs, None)
    return output
