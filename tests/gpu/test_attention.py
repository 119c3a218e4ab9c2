"""The kernels of GPUs over packed rows, against the attention in plain PyTorch, which CI tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specrl.training.batches import TokenSequence, pack
from specrl.training.drafter import attention
from specrl.training.drafter.attention import Spans, attend
from specrl.training.megatron.attention import KERNEL_CAPABILITY, PackedAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: its attention was only tested as emulated"),
]


def outputs(attention: PackedAttention, inputs: list[Tensor], segments: Tensor) -> list[Tensor]:
    """The attention's result, and the gradients of its inputs."""
    leaves = [part.detach().requires_grad_() for part in inputs]
    found = attention(*leaves, segments)
    weight = torch.linspace(-1, 1, found.numel(), device=found.device).view_as(found)
    (found * weight).sum().backward()
    return [found.detach(), *(part.grad for part in leaves if part.grad is not None)]


def test_the_kernel_computes_what_the_plain_attention_does() -> None:
    pytest.importorskip("transformer_engine.pytorch")
    if torch.cuda.get_device_capability() < KERNEL_CAPABILITY:
        pytest.skip("a GPU before Hopper uses the plain attention")
    sequences = [TokenSequence.of([group] * 70, [9] * (20 + 30 * n), 4 * group + n) for group in (1, 2) for n in (0, 1)]
    [batch] = pack([*sequences, TokenSequence([5] * 90, 1, 99)], 1024, 16)
    sizes = {"num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 64, "tensor_model_parallel_size": 1}
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(len(batch.tokens), 1, heads, 64, device="cuda", generator=generator).bfloat16()
        for heads in (8, 2, 2)
    ]
    plain = PackedAttention(SimpleNamespace(params_dtype=torch.float32, **sizes), 1)
    expected = outputs(plain, [part.float() for part in inputs], batch.segments)
    found = outputs(PackedAttention(SimpleNamespace(params_dtype=torch.bfloat16, **sizes), 1), inputs, batch.segments)
    for mine, reference in zip(found, expected, strict=True):
        assert float((mine.float() - reference).norm() / reference.norm()) < 0.02


@pytest.mark.parametrize("window", [None, 96])
def test_the_drafters_flash_attention_computes_what_the_plain_attention_does(window: int | None) -> None:
    """Rows that end their queries before all keys are seen, a window, and three own keys of each query."""
    spans = Spans((0, 70, 71, 260), (0, 400, 401, 590), torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(260, 8), (590, 2), (590, 2), *[(260, 2)] * 6]
    inputs = [torch.randn(*shape, 64, device="cuda", generator=generator).bfloat16() for shape in shapes]
    inputs[0] *= 64**-0.5
    grad = torch.randn(260, 8, 64, device="cuda", generator=generator)

    def attended(dtype: torch.dtype) -> list[Tensor]:
        leaves = [part.to(dtype, copy=True).requires_grad_() for part in inputs]
        found = attend(*leaves[:3], spans, window=window, own_keys=leaves[3:6], own_values=leaves[6:])
        return [found.detach(), *torch.autograd.grad(found, leaves, grad.to(dtype))]

    assert (attention._kernel_for(inputs[0]), attention._kernel_for(grad)) == (attention._Flash, attention._Plain)
    for mine, reference in zip(attended(torch.bfloat16), attended(torch.float32), strict=True):
        assert float((mine.float() - reference).norm() / reference.norm()) < 0.02
