"""Print what vLLM would do with the shipped configurations on a GPU, which is made up here.

Arguments: `plain` or `invariant` for Hopper or `blackwell`, a folder for the models' configurations, then configuration
files. What the CUDA build of vLLM has compiled is taken to be there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from specrl.config import Config, load_config
from specrl.models.shapes import KNOWN_SHAPES, ModelShape
from specrl.precision.recipe import KvScales, Recipe
from specrl.rollout.drafts.cost_model import possible_lengths
from specrl.rollout.vllm.engine.arguments import engine_arguments
from specrl.rollout.vllm.engine.lifecycle import set_environment
from specrl.rollout.vllm.engine.patches import with_larger_graphs
from specrl.rollout.vllm.precision import EnginePrecision

COMPILED = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C")
ASKED = ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported")


def become(capability: tuple[int, int]) -> None:
    """Let torch and vLLM take this machine for one with such a GPU, before vLLM is imported."""
    for name in COMPILED:
        sys.modules[name] = ModuleType(name)
    for name, value in (("is_available", True), ("device_count", 1), ("get_device_capability", capability)):
        setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ASKED:
        LIBRARY.define(f"{name}(int capability) -> bool")
        LIBRARY.impl(name, lambda capability: True, "CompositeExplicitAutograd")


def take_platform(capability: tuple[int, int]) -> None:
    """Give vLLM the platform."""
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": DeviceCapability(*capability),
        "get_device_name": "NVIDIA H100" if capability == (9, 0) else "NVIDIA B200",
        "get_device_total_memory": 80 << 30,
        "is_cumem_allocator_available": True,
        "num_compute_units": 132,
    }
    methods = {name: classmethod(lambda *_, value=value, **__: value) for name, value in answers.items()}
    platforms._current_platform = type("MadeUp", (NonNvmlCudaPlatform,), methods)()
    from vllm.utils import deep_gemm

    deep_gemm.has_deep_gemm = lambda: True  # the CUDA build brings it


def write_models(shape: ModelShape, config: Config, folder: Path) -> tuple[Path, Path]:
    """Write the configurations of a policy and its drafter, without weights."""
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3MoeConfig

    from specrl.training.drafter.io import config_dict
    from specrl.training.drafter.kinds.eagle3 import Eagle3Shape

    experts = {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_size,
    }
    policy = (Qwen3MoeConfig if shape.num_experts else Qwen3Config)(
        architectures=["Qwen3MoeForCausalLM" if shape.num_experts else "Qwen3ForCausalLM"],
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_positions,
        dtype="bfloat16",
        **experts if shape.num_experts else {},
    )
    policy.save_pretrained(folder / "policy")
    drafter = folder / "drafter"
    drafter.mkdir()
    eagle = Eagle3Shape.from_policy(policy, config.drafter.draft_vocab_size, None)
    (drafter / "config.json").write_text(json.dumps(config_dict(eagle, policy, 0)))
    save_file({"fc.weight": torch.zeros(1)}, drafter / "model.safetensors")
    return folder / "policy", drafter


def found(path: Path, folder: Path, *, batch_invariant: bool) -> dict[str, Any]:
    """Return what vLLM makes of a configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    config = load_config(path)
    shape = KNOWN_SHAPES[config.model.source]
    policy, drafter = write_models(shape, config, folder / f"{path.stem}-{batch_invariant}")
    scales = [1.0] * shape.num_layers
    recipe = Recipe(shape.family, shape.num_layers, kv_scales=KvScales(scales, scales, scales))
    precision, longest = EnginePrecision(config.precision, recipe), max(config.speculation.draft_lengths)
    routes = bool(shape.num_experts)
    directories = policy, drafter, 0, longest, precision
    arguments = engine_arguments(config, *directories, alone=False, keeps_routes=routes)
    lonely = engine_arguments(config, *directories, alone=True)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(config.engine.tensor_parallel)}
    vllm_config = EngineArgs(**arguments).create_engine_config()
    compilation, lengths = vllm_config.compilation_config, possible_lengths(longest, config.speculation.k)
    with set_current_vllm_config(vllm_config):
        from vllm.v1.attention.selector import get_attn_backend

        return {
            "sleeps": [vllm_config.model_config.enable_sleep_mode, lonely["enable_sleep_mode"]],
            "second_runner": vllm_config.use_v2_model_runner,
            "asynchronous": vllm_config.scheduler_config.async_scheduling,
            "full_graphs": compilation.cudagraph_mode.decode_mode().name,
            "sizes": compilation.cudagraph_capture_sizes,
            "without_graph": without_graph(vllm_config, config.engine.max_num_seqs, lengths),
            "linear": linear_kernel(shape.hidden_size),
            "attention": get_attn_backend(shape.head_dim, torch.bfloat16, "fp8").get_name(),
        }


def without_graph(vllm_config: Any, max_num_seqs: int, lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the decoding batches, as (requests, draft length), for which vLLM's runner would have no full graph."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, _is_compatible

    manager = CudaGraphManager.__new__(CudaGraphManager)
    manager.vllm_config, manager.compilation_config = vllm_config, vllm_config.compilation_config
    manager.cudagraph_mode, manager.max_num_reqs = manager.compilation_config.cudagraph_mode, max_num_seqs
    manager.decode_query_len, manager.varlen_decode = vllm_config.num_speculative_tokens + 1, False
    manager.ubatch_runner, manager.lora_capture_cases = None, [0]
    manager._candidates, manager._capture_descs = {}, {}
    with_larger_graphs(CudaGraphManager._init_candidates)(manager)
    missing = []
    for batch in range(1, max_num_seqs + 1):
        for length in lengths:
            rows = batch * (length + 1)
            candidates = manager._candidates.get((rows, 0), [])
            fits = [graph for graph in candidates if _is_compatible(graph, batch, rows, length + 1, 0, length + 1, 1)]
            if not any(graph.cg_mode == CUDAGraphMode.FULL for graph in fits):
                missing.append((batch, length))
    return missing


def linear_kernel(size: int) -> str:
    """Return the name of the kernel that multiplies FP8 matrices in blocks."""
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod

    method = Fp8PerBlockOnlineLinearMethod()
    kernel = init_fp8_linear_kernel(
        activation_quant_key=method.activation_quant_key,
        weight_quant_key=method.weight_quant_key,
        weight_shape=(size, size),
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
        module_name="linear",
    )
    return type(kernel).__name__


if __name__ == "__main__":
    LIBRARY = torch.library.Library("_C", "FRAGMENT")
    gpu = (10, 0) if sys.argv[1] == "blackwell" else (9, 0)
    become(gpu)
    is_invariant = sys.argv[1] == "invariant"
    set_environment(batch_invariant=is_invariant)
    take_platform(gpu)
    answers = {path: found(Path(path), Path(sys.argv[2]), batch_invariant=is_invariant) for path in sys.argv[3:]}
    print(json.dumps(answers))
