"""What vLLM is started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from specrl.config import Config

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
"""Set, where the user has not, before vLLM is imported."""
NGRAM_LOOKUP = (2, 4)
"""Shortest and longest n-gram looked up in the sequence so far."""


def engine_arguments(config: Config, policy_dir: Path, drafter_dir: Path | None, seed: int, k: int) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`. `k = 0` decodes plainly.

    The engine's context is k + 1 tokens longer than `model.max_length`: near its end vLLM would stop drafting for the
    whole batch, and a sequence of full length could not be scored.
    """
    arguments: dict[str, Any] = {
        "model": str(policy_dir),
        "dtype": config.model.dtype,
        "seed": seed,
        "max_num_seqs": config.engine.max_num_seqs,
        "tensor_parallel_size": config.engine.tensor_parallel,
        "distributed_executor_backend": "external_launcher",
        "async_scheduling": False,
        "enforce_eager": not config.engine.compile,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "disable_log_stats": True,
        **_context(policy_dir, config.model.max_length + k + 1),
        **_memory(config),
    }
    if k:
        arguments["speculative_config"] = {
            "num_speculative_tokens": k,
            "num_speculative_tokens_per_batch_size": [(1, config.engine.max_num_seqs, k)],
            **_draft_source(config, drafter_dir),
        }
    return arguments


def stop_tokens(policy_dir: Path, tokenizer: Any) -> list[int]:
    """End tokens by the model's configuration, its generation configuration and the tokenizer."""
    ids: set[int] = {tokenizer.eos_token_id} - {None}
    for name in ("config.json", "generation_config.json"):
        path = policy_dir / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        ids.update([value] if isinstance(value, int) else value or [])
    return sorted(ids)


def _context(policy_dir: Path, length: int) -> dict[str, Any]:
    hf_config = json.loads((policy_dir / "config.json").read_text())
    longest = hf_config.get("max_position_embeddings", length)
    if length <= longest:
        return {"max_model_len": length}
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return {"max_model_len": longest}
    # Plain rotary embeddings are the same function of the position whatever their table's length.
    return {"max_model_len": length, "hf_overrides": {"max_position_embeddings": length}}


def _memory(config: Config) -> dict[str, Any]:
    if torch.cuda.is_available():
        return {"gpu_memory_utilization": config.engine.gpu_memory_fraction}
    return {"kv_cache_memory_bytes": int(config.engine.kv_cache_gib * 2**30)}


def _draft_source(config: Config, drafter_dir: Path | None) -> dict[str, Any]:
    method = config.speculation.method
    if method == "ngram":
        shortest, longest = NGRAM_LOOKUP
        return {"method": "ngram", "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    if drafter_dir is None:
        raise ValueError(f'speculation.method = "{method}" needs a drafter directory; pass one or speculate=False')
    return {"method": method, "model": str(drafter_dir), "draft_tensor_parallel_size": config.engine.tensor_parallel}
