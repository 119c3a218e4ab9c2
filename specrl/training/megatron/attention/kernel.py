"""Attention over a flat row by Transformer Engine's variable-length kernels, for GPUs.

A shared prompt's keys and values are gathered for each of its responses. So every segment is one item of the kernel's
batch whose last query sees all of its keys: the causal mask is aligned at the bottom right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as extension
from torch import Tensor

from specrl.training.megatron.attention.layout import RowLayout, row_layout
from specrl.training.megatron.attention.local import attend

KERNEL_CAPABILITY = (9, 0)
"""The first generation of GPUs (Hopper) on which cuDNN's kernels take variable lengths."""

Kernel = Callable[[Tensor, Tensor, Tensor, RowLayout], Tensor]
"""A function of queries [tokens, heads, width] and, gathered as in `RowLayout.keys`, keys and values
[keys, groups, width] that returns [tokens, heads x width]."""


class PackedAttention(torch.nn.Module):
    """Megatron's `core_attention` over a flat row, whose queries and keys come rotated.

    There is no kernel for float32 and for GPUs before Hopper; there the attention is that of `local.py`.
    """

    def __init__(self, config: Any, layer_number: int, kernel: Kernel | None = None, **_: Any) -> None:
        super().__init__()
        self._kernel = kernel or _transformer_engine(config, layer_number)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        """[tokens, 1, heads x width], given [tokens, 1, heads, width] and `MicroBatch.segments` as the mask."""
        layout = row_layout(attention_mask, query.device)
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        if self._kernel is None:
            return attend(*(x.transpose(0, 1) for x in (q, k, v)), layout.segments)
        if layout.keys is not None:
            k, v = k[layout.keys], v[layout.keys]  # whose backward pass adds up in a fixed order
        return self._kernel(q, k, v, layout).reshape(len(q), 1, -1)


def _transformer_engine(config: Any, layer_number: int) -> Kernel | None:
    if config.params_dtype == torch.float32 or torch.cuda.get_device_capability() < KERNEL_CAPABILITY:
        return None
    module = extension.te.pytorch.DotProductAttention(
        num_attention_heads=config.num_attention_heads,
        kv_channels=config.kv_channels,
        num_gqa_groups=config.num_query_groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal_bottom_right",
        tp_size=config.tensor_model_parallel_size,
        layer_number=layer_number,
        attention_type="cross",
    )

    def kernel(q: Tensor, k: Tensor, v: Tensor, layout: RowLayout) -> Tensor:
        queries, keys = layout.ends
        result: Tensor = module(
            q,
            k,
            v,
            qkv_format="thd",
            cu_seqlens_q=queries,
            cu_seqlens_kv=keys,
            max_seqlen_q=layout.most_queries,
            max_seqlen_kv=layout.longest,
            attn_mask_type="padding_causal_bottom_right",
        )
        return result

    return kernel
