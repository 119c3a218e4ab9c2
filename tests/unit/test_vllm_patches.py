"""What is replaced in vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from threading import Event, Thread
from types import ModuleType

import pytest
import torch
from vllm.model_executor.layers import utils

from specrl import cpu_products
from specrl.rollout.vllm.engine.patches import _OwnModules, pack_bf16_in_float32


@pytest.fixture
def importing() -> Iterator[None]:
    """Another thread, which gets its turn after every few instructions, adds modules, and takes them away again."""

    def import_modules() -> None:
        for number in count():
            if done.is_set():
                return
            sys.modules[f"imported_{number % 1000}"] = ModuleType("imported")
            if number % 1000 == 999:
                forget()

    def forget() -> None:
        for name in [name for name in list(sys.modules) if name.startswith("imported_")]:
            del sys.modules[name]

    done, interval = Event(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = Thread(target=import_modules)
    thread.start()
    yield
    done.set()
    thread.join()
    sys.setswitchinterval(interval)
    forget()


def test_vllms_modules_are_listed_while_another_thread_imports(importing: None) -> None:
    for _ in range(50):
        assert all(name.partition(".")[0] == "vllm" for name in _OwnModules().modules)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU vLLM packs nothing")
@pytest.mark.parametrize("removes", [True, False])
def test_a_linear_layer_in_bf16_is_computed_in_float32_and_rounded_once(
    removes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.setattr(cpu_products, "has_bf16", lambda: False)
    pack_bf16_in_float32()
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(96, 40).bfloat16().requires_grad_(False), torch.randn(7, 96).bfloat16()
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    plain = torch.nn.functional.linear(x.double(), layer.weight.double())
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=removes)
    for found, expected in ((layer.cpu_linear(x, None, layer.bias), exact), (layer.cpu_linear(x, None, None), plain)):
        assert found.dtype == torch.bfloat16
        assert ((found.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all()
    assert layer.weight.numel() == (0 if removes else 40 * 96)
