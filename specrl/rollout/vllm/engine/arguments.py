"""The arguments that vLLM is started with, and the parameters of each request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specrl.config import Config
from specrl.config.methods import NGRAM
from specrl.config.rollout import ALONE_FRACTION, batched_tokens
from specrl.models.directory import read_model_config
from specrl.models.drafters import has_window
from specrl.models.hf_io import TensorReader
from specrl.models.mtp_modules import MTP_LAYERS
from specrl.rollout.drafts.cost_model import possible_lengths
from specrl.rollout.requests import Request
from specrl.rollout.vllm.engine.running import NUM_COLUMNS, NUM_PROMPT_COLUMNS
from specrl.rollout.vllm.precision import EnginePrecision
from specrl.training.drafter.io import check_offsets

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    # For native FP8. DeepGEMM would round the scales of blocks up to powers of two and quantise weights with these,
    # which would differ from the trainer's numbers.
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    # FlashInfer's product uses one kernel for fewer than 32 tokens and another otherwise: a token's log-prob would
    # depend on the size of its batch.
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    # FlashInfer's all-reduce adds in no fixed order: a run with the same weights would not be reproducible.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
"""Environment variables that are set before vLLM is imported."""
OF_THE_USER = ("VLLM_LOGGING_LEVEL", "VLLM_CPU_OMP_THREADS_BIND")  # those that keep the user's values
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""The variable that makes vLLM use its batch-invariant kernels, for the whole process."""
FIRST_INVARIANT_CAPABILITY = (9, 0)
"""The first compute capability with which a trainer can be beside them. On older devices vLLM replaces torch's `linear`
and `matmul` for the whole process, without their gradients."""

POSITIONS = "max_position_embeddings"
CPU_BLOCK_TOKENS = 32
"""The size of a KV cache block on CPUs, the smallest that their attention kernels take.

Prompts that begin alike share whole blocks only, and vLLM's own size on CPUs, 128, is longer than many prompts.
"""
MISLEADING = ("eagle-", "eagle3", "dflash", "dspark")
"""The words from which vLLM guesses a method in the path of a draft model."""
NEVER_GUESSED = ("eagle", "eagle3", "dflash", "dspark")
"""The methods for which vLLM does not guess another one from the path."""


def engine_arguments(
    config: Config,
    policy_dir: Path,
    drafter_dir: Path | None,
    seed: int,
    longest: int,
    precision: EnginePrecision,
    *,
    alone: bool,
    keeps_routes: bool = False,
) -> dict[str, Any]:
    """The arguments of vLLM's `EngineArgs` for drafts of up to `longest` tokens; 0 decodes plainly.

    The engine's context is longer than `model.max_length`, if the model allows it: sequences of that length are scored,
    and vLLM would stop drafting for the whole batch once a draft under verification and the next one do not fit.
    """
    max_model_len, updates = _context(policy_dir, config.model.max_length + 2 * longest + 1)
    updates |= precision.hf_updates()
    lengths: Sequence[int] = (0, longest)
    if longest and config.speculation.adaptive:
        lengths = possible_lengths(longest, config.speculation.draft_lengths[0])
    arguments: dict[str, Any] = {
        "model": str(policy_dir),
        "dtype": config.model.dtype,
        "seed": seed,
        "max_num_seqs": config.engine.max_num_seqs,
        "max_num_batched_tokens": batched_tokens(config.engine.max_num_seqs, longest),
        "tensor_parallel_size": config.engine.tensor_parallel,
        "distributed_executor_backend": "external_launcher",
        "async_scheduling": True,
        "enforce_eager": not config.engine.compile,
        "enable_prefix_caching": True,
        # Sleep mode's allocator serves one engine per process, and may keep its memory when that engine is gone.
        "enable_sleep_mode": config.engine.sleep and not alone and torch.cuda.is_available(),
        "generation_config": "vllm",
        "disable_log_stats": True,
        "skip_tokenizer_init": True,  # requests are tokens, and so are the responses
        "max_model_len": max_model_len,
        "enable_return_routed_experts": keeps_routes,
        "compilation_config": {"cudagraph_capture_sizes": capture_sizes(config.engine.max_num_seqs, lengths)},
        **_memory(config, alone=alone),
        **precision.arguments(),
    }
    if config.engine.tensor_parallel > 1:
        # On Hopper and Blackwell this fusion is FlashInfer's all-reduce too.
        arguments["compilation_config"]["pass_config"] = {"fuse_allreduce_rms": False}
        # vLLM's own all-reduce needs access to the other ranks' GPUs, which a rank that sees only its own lacks.
        arguments["disable_custom_all_reduce"] = torch.cuda.device_count() == 1
    if drafter_dir is not None and has_window(drafter_dir):
        # For a drafter with a sliding window vLLM would divide the policy's layers into groups as small as the drafter,
        # each with its own block table.
        arguments["disable_hybrid_kv_cache_manager"] = True
    if longest and config.speculation.draft_method.is_policy_layer:
        arguments["hf_overrides"] = partial(_updated, updates)
    elif updates:
        arguments["hf_overrides"] = updates
    if longest:
        arguments |= _drafting(config, policy_dir, drafter_dir, lengths)
    return arguments


def _drafting(config: Config, policy_dir: Path, drafter_dir: Path | None, lengths: Sequence[int]) -> dict[str, Any]:
    return {
        "additional_config": {"drafter_k": config.speculation.draft_lengths[0]},
        "speculative_config": {
            "num_speculative_tokens": max(lengths),
            "num_speculative_tokens_per_batch_size": schedule(config.engine.max_num_seqs, lengths),
            **_proposer(config, policy_dir, drafter_dir),
        },
    }


def schedule(max_num_seqs: int, lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """A schedule of vLLM's that names these draft lengths in turn, as (first batch, last batch, length).

    vLLM captures full CUDA graphs for the lengths listed there. The length of each batch is chosen at run time.
    """
    return [(batch, batch, lengths[-batch % len(lengths)]) for batch in range(1, max_num_seqs + 1)]


def capture_sizes(max_num_seqs: int, lengths: Sequence[int]) -> list[int]:
    """List the numbers of tokens to capture CUDA graphs for, so that every batch of these draft lengths has a full one.

    vLLM's own sizes end at 512 tokens and are multiples of 8: a full batch of another size would run without a graph.
    """
    batches = {1, 2, 4, *range(8, min(max_num_seqs, 256), 8), *range(256, max_num_seqs, 16), max_num_seqs}
    return sorted({batch * (length + 1) for batch in batches if batch <= max_num_seqs for length in lengths})


def without_weights(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an engine that reads the weights of a drafter, but not those of the policy."""
    from vllm.config import LoadConfig

    found = {**arguments, "load_format": "dummy"}
    if "speculative_config" in arguments:
        found["speculative_config"] = {**arguments["speculative_config"], "draft_load_config": LoadConfig()}
    return found


def _proposer(config: Config, policy_dir: Path, drafter_dir: Path | None) -> dict[str, Any]:
    method = config.speculation.draft_method
    if method.vllm is None:
        return dict(NGRAM)  # which never drafts: see `text_speculator`
    if method.model is None:
        return dict(method.vllm)
    # Without `model`, vLLM would also find the policy's own layer, but expect it in the policy's precision.
    directories = {
        "drafter": drafter_dir,
        "policy_layer": drafter_dir or policy_dir,
        "draft_model": config.speculation.draft_model,
    }
    directory = directories[method.model]
    if directory is None:
        raise ValueError(f'speculation.method = "{method.name}" needs a drafter directory; pass one or speculate=False')
    if method.vllm["method"] not in NEVER_GUESSED:
        _refuse_misleading_path(str(directory))
    if method.model != "policy_layer":
        _check_positions(directory, policy_dir, config.model.max_length)
    if method.model == "drafter":
        _check_draft_vocabulary(directory, policy_dir)
    return {
        **method.vllm,
        "model": str(directory),
        "draft_tensor_parallel_size": config.engine.tensor_parallel,
    }


def generation_params(request: Request, max_length: int, stop_tokens: list[int]) -> Any:
    """vLLM's `SamplingParams` for a request; its log-probs are the columns of `InvariantSampler`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    room = max_length - len(request.prompt_tokens)
    if room < 1:
        raise ValueError(
            f"a prompt of {len(request.prompt_tokens)} tokens leaves no room for a response within "
            f"model.max_length = {max_length}; raise it or leave the prompt out"
        )
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        logprobs=NUM_COLUMNS - 1,
        max_tokens=min(request.max_tokens, room),
        stop_token_ids=stop_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def reading_params(params: Any, *, cached: bool) -> Any:
    """A request's parameters for a pass over text after its prompt, with the `PromptColumns` of each token."""
    read = params.clone()
    changes = {"max_tokens": 1, "prompt_logprobs": NUM_PROMPT_COLUMNS - 1, "skip_reading_prefix_cache": not cached}
    for name, value in changes.items():
        setattr(read, name, value)
    return read


def scoring_params() -> Any:
    """vLLM's `SamplingParams` for scoring a sequence given as a prompt; its one new token is discarded."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        seed=0,
    )


def stop_tokens(policy_dir: Path, tokenizer: Any) -> list[int]:
    """The end tokens that the model's configuration, its generation configuration and the tokenizer name."""
    ids: set[int] = {tokenizer.eos_token_id} - {None}
    for name in ("config.json", "generation_config.json"):
        path = policy_dir / name
        value = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
        ids.update([value] if isinstance(value, int) else value or [])
    return sorted(ids)


def _context(policy_dir: Path, length: int) -> tuple[int, dict[str, Any]]:
    hf_config = json.loads((policy_dir / "config.json").read_bytes())
    longest = hf_config.get(POSITIONS, length)
    if length <= longest:
        return length, {}
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return longest, {}
    # Plain rotary embeddings do not depend on their table's length.
    return length, {POSITIONS: length}


def _updated(updates: dict[str, Any], hf_config: Any) -> Any:
    """Update a configuration as vLLM does with a dictionary of overrides.

    vLLM also applies this function to the configuration of the multi-token-prediction layers, which need as many
    positions as the policy, but none of the policy's other entries. Of several such layers only the first, which is
    the trained one, drafts.
    """
    for_layer = hf_config.model_type.endswith("_mtp")
    hf_config.update({key: value for key, value in updates.items() if key == POSITIONS or not for_layer})
    if for_layer:
        hf_config.update({MTP_LAYERS: 1, "n_predict": 1})
    return hf_config


def gpu_memory(share: float) -> dict[str, Any]:
    """The argument that makes an engine use this share of a GPU's memory; none on CPUs."""
    return {"gpu_memory_utilization": share} if torch.cuda.is_available() else {}


def _memory(config: Config, *, alone: bool) -> dict[str, Any]:
    if torch.cuda.is_available():
        fraction = config.engine.gpu_memory_fraction
        return gpu_memory(max(fraction, ALONE_FRACTION) if alone else fraction)
    cache_bytes = int(config.engine.kv_cache_gib * 2**30)
    return {"kv_cache_memory_bytes": cache_bytes, "block_size": CPU_BLOCK_TOKENS}


def _check_positions(directory: Path, policy_dir: Path, max_length: int) -> None:
    # vLLM would read beyond the end of the rotary table, and drafts there would silently no longer be accepted.
    longest, needed = (
        json.loads((folder / "config.json").read_bytes()).get(POSITIONS, max_length)
        for folder in (directory, policy_dir)
    )
    needed = min(needed, max_length)
    if longest < needed:
        raise ValueError(
            f"the drafter in {directory} has {POSITIONS} = {longest}, and a policy with sequences of {needed} tokens "
            f"needs as many; train it for that length, or write {needed} there if its rotary embeddings are plain"
        )


def _check_draft_vocabulary(directory: Path, policy_dir: Path) -> None:
    reader = TensorReader(directory)
    if "d2t" in reader.names:
        try:
            check_offsets(reader.read("d2t"), read_model_config(policy_dir)["vocab_size"])
        except ValueError as error:
            raise ValueError(f"the drafter in {directory}: {error}") from error


def _refuse_misleading_path(directory: str) -> None:
    # vLLM guesses the method in `SpeculativeConfig.__post_init__`, whatever is set.
    found = [word for word in MISLEADING if word in directory.lower()]
    if found:
        raise ValueError(
            f'vLLM would take {directory} for another kind of drafter because of "{found[0]}" in its path: '
            "choose another folder, run name or runs_dir"
        )
