"""Norms and SiLU inside an engine on a CPU: kernels that give what PyTorch gives, each row from that row alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from specrl.rollout.vllm.engine.cpu_layers import use_kernels
from tests.exactness.conftest import Start
from tests.exactness.engines import mixed_requests

WIDTH, ROWS = 96, 37
EPS = 1e-5
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
"""The largest difference relative to a result that is rounded once."""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU vLLM has kernels of its own")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def layers(request: pytest.FixtureRequest) -> Iterator[torch.nn.Module]:
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        norm = RMSNorm(WIDTH, eps=EPS, dtype=request.param)
        norm.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        found = torch.nn.ModuleDict({"norm": norm, "silu": SiluAndMul()})
        use_kernels(found)
        yield found


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def gated(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rows(layers: torch.nn.Module, columns: int, count: int = ROWS) -> Tensor:
    weight: Any = layers.get_submodule("norm").weight
    return 3 * torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(weight.dtype)


def test_a_result_is_rounded_once(layers: Any) -> None:
    x, added, gates = rows(layers, WIDTH), rows(layers, WIDTH, ROWS + 1)[1:], rows(layers, 2 * WIDTH)
    before, weight = (x.clone(), added.clone()), layers["norm"].weight
    result, summed = layers["norm"](x, added)
    pairs = [
        (layers["norm"](x), normed(x, weight)),
        (summed, x.double() + added.double()),
        (result, normed(summed, weight)),
        (layers["silu"](gates), gated(gates)),
    ]
    for actual, expected in pairs:
        assert actual.dtype == x.dtype
        assert ((actual.double() - expected).abs() <= ROUNDING[x.dtype] * expected.abs() + 1e-6).all()
    assert x.equal(before[0]) and added.equal(before[1]), "others may still read the inputs"


def test_a_row_is_computed_from_that_row_alone(layers: Any) -> None:
    x, added, gates = rows(layers, WIDTH), rows(layers, WIDTH, ROWS + 1)[1:], rows(layers, 2 * WIDTH)
    norm, silu = layers["norm"], layers["silu"]
    together = norm(x), *norm(x, added), silu(gates)
    for first, last in ((0, 1), (5, 6), (5, 13), (30, ROWS)):
        part = slice(first, last)
        alone = norm(x[part]), *norm(x[part], added[part]), silu(gates[part])
        assert all(one.equal(all_rows[part]) for one, all_rows in zip(alone, together, strict=True))


def test_a_view_of_heads_is_normed_as_its_copy(layers: Any) -> None:
    """As the norms of queries and keys are, which lie beside each other."""
    heads = rows(layers, 3 * WIDTH)[:, WIDTH:].unflatten(-1, (2, WIDTH))
    assert layers["norm"](heads).equal(layers["norm"](heads.contiguous()))


@pytest.mark.engine
def test_an_engine_uses_them(engine_of: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_pytorch(*_: Any) -> None:
        raise AssertionError("the operators of PyTorch")

    for layer in (RMSNorm, SiluAndMul):
        monkeypatch.setattr(layer, "forward_native", of_pytorch)
    engine = engine_of("eagle3")
    assert engine.generate(mixed_requests(4)).stats.num_accepted_tokens
