"""A layer in vLLM's native block FP8, compared bit for bit with what vLLM makes of the trainer's tensor."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest

NAMES = ["model.layers.0.self_attn.q_proj.weight", *(f"model.layers.0.self_attn.{x}_proj.weight" for x in "kv")]


def load_rows(param: Any, loaded_weight: Any, first: int) -> None:
    param.data[first : first + len(loaded_weight)].copy_(loaded_weight)


def loadable(weight: Any) -> Any:
    """Make it a parameter as vLLM makes them, whose constructor would want to know the tensor-parallel ranks."""
    from vllm.model_executor.parameter import ModelWeightParameter

    weight.__class__, weight.weight_loader = ModelWeightParameter, load_rows
    return weight


def error_after(change: str) -> str:
    """Load three fused matrices, and load them twice again as refits do on a GPU; change something, and compare."""
    import specrl.rollout.vllm.cpu_kernels  # noqa: F401  (must precede vllm)

    # isort: split
    import torch
    from torch import nn
    from torch._dynamo.utils import counters
    from vllm.model_executor.kernels.linear import TritonFp8BlockScaledMMKernel
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod
    from vllm.model_executor.model_loader.reload import layerwise

    from specrl.models.families import LLAMA
    from specrl.rollout.errors import PolicyParityError
    from specrl.rollout.vllm.weights.comparison import Expected, _quantised

    torch.manual_seed(0)
    parts = [torch.randn(rows, 256).bfloat16() for rows in (256, 128, 128)]
    layer = LinearBase.__new__(LinearBase)
    nn.Module.__init__(layer)
    layer.weight = loadable(torch.cat(parts))
    layer.weight_block_size, layer.quant_config = [128, 128], SimpleNamespace(online_quantization_config=None)
    # Their constructors want an engine's configuration, and choose a kernel that there is on a GPU alone.
    layer.quant_method = object.__new__(Fp8PerBlockOnlineLinearMethod)
    layer.quant_method.weight_block_size, layer.quant_method.requantization_source = [128, 128], None
    layer.quant_method.fp8_linear = object.__new__(TritonFp8BlockScaledMMKernel)
    model = nn.Module()
    model.add_module("embed", nn.Embedding(2, 2, dtype=torch.bfloat16))
    place: nn.Module = model
    for name in ("model", "layers", "0", "self_attn"):
        place.add_module(name, nn.Module())
        place = place.get_submodule(name)
    place.add_module("qkv_proj", layer)
    layerwise.record_metadata_for_reloading(model)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight.dtype == torch.float8_e4m3fn and layer.weight_scale_inv.shape == (4, 2)
    before = layer.weight.data_ptr(), layer.weight_scale_inv.data_ptr()
    for refit in range(2):
        expected = Expected(model, LLAMA)
        with torch.inference_mode():
            layerwise.initialize_layerwise_reload(model)
            _quantised(layer, [torch.randn(256 + 256 * refit, 384).bfloat16()], torch.device("cpu"))  # another layer's
            for first, (_, part) in zip((0, 256, 384), expected.noted(zip(NAMES, parts, strict=True)), strict=True):
                loaded = part.clone()
                if change == "stale" and first == 0 and refit:
                    loaded[200] *= 2
                layer.weight.weight_loader(layer.weight, loaded, first)
            layerwise.finalize_layerwise_processing(model, None)
    # Quantising compiled once for the start and once for all reloads and shapes: what is expected comes from the same
    # kernels. After eight graphs torch would compute without one, and otherwise.
    assert counters["stats"]["unique_graphs"] == 2
    if change == "weight":
        layer.weight.data.view(torch.uint8)[300, 7] ^= 1
    if change == "scale":
        layer.weight_scale_inv.data.view(torch.int32)[1, 1] += 1
    assert before == (layer.weight.data_ptr(), layer.weight_scale_inv.data_ptr())  # graphs read from there
    try:
        expected.check()
    except PolicyParityError as error:
        return str(error)
    return ""


@pytest.mark.engine
def test_every_bit_of_weights_and_scales_counts() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = [pool.submit(error_after, change).result() for change in ("nothing", "weight", "scale", "stale")]
    wrong = f"the engine's policy differs from the trainer's in {', '.join(NAMES)}"
    assert found == ["", wrong, wrong, wrong]
