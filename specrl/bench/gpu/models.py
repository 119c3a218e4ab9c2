"""The random models of `specrl bench gpu`, and their sizes on a GPU and on a CPU. Nothing is downloaded."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from specrl.config import Config, load_config
from specrl.models.families import TINY_VOCAB_SIZE
from specrl.models.tiny import character_tokenizer
from specrl.training.drafter.io import config_dict, vocabulary_tensors, write_drafter
from specrl.training.drafter.kinds.eagle3 import Eagle3, Eagle3Shape

SHIPPED = Path(__file__).parents[3] / "configs" / "qwen3-8b-rl-zero.toml"
OF_STEPS = (
    'name="step"',
    'cluster.backend="local"',
    "stage_resources={}",
    "train.checkpoint_every=300",
    "train.drop_zero_signal_groups=false",
    'data.reward=[{name="length", parameters={target=0, limit=65536}}]',  # random texts differ in length
    "precision.max_token_mult_prob_error=1e9",  # tokens accepted by chance are not the policy's
)
LIKELY = tuple(range(8, 18))  # tokens that the sharp policy favours, so that even an untrained drafter is often right
GIB = 2**30
CALLS = 20  # timed together
Row = dict[str, Any]
SIZES: tuple[str, ...] = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim", "vocab_size")


def decoder(*sizes: int) -> Qwen3Config:
    """A model with these `SIZES`."""
    settings: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return Qwen3Config(**settings, **tokens, **dict(zip(SIZES, sizes, strict=True)))


@dataclass(frozen=True)
class Scale:
    name: str
    served: Qwen3Config  # timed in generation, with dummy weights
    draft_vocab: int
    trained: Qwen3Config  # trained for a few steps
    sequences: int
    length: int  # tokens per training sequence
    rows: tuple[int, ...]  # rows of logits to sample from; requests that draft from text
    batches: tuple[int, ...]
    new_tokens: int
    repeats: int
    requests: int  # for the exactness check
    stepped: Qwen3Config  # takes RL steps
    changes: tuple[str, ...]  # `KEY=VALUE`, of the shipped configuration for these steps


SHARP = decoder(128, 256, 6, 4, 2, 32, TINY_VOCAB_SIZE)
_SMALL, _LEAST = decoder(128, 256, 6, 4, 2, 32, 1024), decoder(128, 256, 4, 2, 1, 64, TINY_VOCAB_SIZE)
_STEPPED = decoder(256, 512, 6, 2, 2, 128, 1024)  # heads and shards of whole FP8 blocks
_CHANGES = (
    'data.generators=[{name="worked_sums", parameters={terms=[2], high=9, large_share=0.0}}]',
    'data.template="{prompt}"',
    "model.max_length=96",
    "sampling.max_response_tokens=32",
    "train.samples_per_prompt=2",
    "policy.tokens_per_micro_batch=512",
    "drafter.draft_vocab_size=256",
    "engine.max_num_seqs=8",
    "engine.kv_cache_gib=0.125",
    "engine.compile=false",
)
SHORT = Scale("short", _SMALL, 256, _LEAST, 4, 48, (8,), (1, 4), 12, 1, 8, _STEPPED, _CHANGES)
_LARGE, _MEDIUM = decoder(4096, 12288, 36, 32, 8, 128, 151936), decoder(2048, 6144, 28, 16, 8, 128, 32768)
FULL = Scale("full", _LARGE, 32000, _MEDIUM, 16, 2048, (8, 64, 256, 1024), (1, 8, 32, 128), 128, 3, 64, _LARGE, ())


def forget_memory() -> None:
    """Free unreferenced memory and reset `peak_memory`."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def least_seconds(work: Callable[[], object], scale: Scale) -> float:
    """The time of the fastest call except the first, which compiles and warms up."""
    found = []
    for _ in range(scale.repeats + 1):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def microseconds(work: Callable[[], object], scale: Scale) -> float:
    """The time of a call between others: the GPU works on one while the host prepares the next."""
    calls = CALLS if torch.cuda.is_available() else 1
    return 1e6 / calls * least_seconds(lambda: [work() for _ in range(calls)], scale)


def memory_beside(planned_gib: float) -> Row:
    """The columns that compare the peak memory since `forget_memory` with the plan; unknown on CPUs."""
    peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None
    return {"peak_gib": peak, "planned_gib": planned_gib, "of_plan": peak and peak / planned_gib}


def gpu_gib() -> float:
    """The memory of a GPU, found without occupying any of it; where there is none, that of a usual one."""
    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else 80.0


def bench_config(source: Path, max_length: int, **sections: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "name": "bench-gpu",
            "model": {"source": str(source), "max_length": max_length, **sections.pop("model", {})},
            "sampling": {"max_response_tokens": max_length // 2},
            "resources": {"gpus_per_rank": int(torch.cuda.is_available()), "gpu_memory_gib": gpu_gib()},
            **sections,
        }
    )


def shipped(scale: Scale, *changes: str) -> Config:
    """The shipped 8B configuration at this scale, with further changes, for steps that write no checkpoint."""
    return load_config(SHIPPED, [*OF_STEPS, *scale.changes, *changes])


def write_config(model: Qwen3Config, max_length: int, directory: Path, dtype: str = "bfloat16") -> Path:
    """Write a model's directory without weights, for engines that load dummy weights; return the directory."""
    model.max_position_embeddings, model.dtype = max_length, dtype
    model.save_pretrained(directory)
    character_tokenizer(max_length).save_pretrained(directory)
    return directory


def write_policy(
    model: Qwen3Config, max_length: int, directory: Path, dtype: str = "bfloat16", *, sharp: bool = False
) -> Path:
    """Write a random policy; a `sharp` one favours the tokens of `LIKELY`, each slightly less than the one before."""
    write_config(model, max_length, directory, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = Qwen3ForCausalLM(model)
    if sharp:
        embeddings, head = policy.model.embed_tokens.weight.data, policy.lm_head.weight.data
        embeddings.mul_(10)[:, 0] = 3.0
        policy.model.norm.weight.data[0] = 1.0
        head.mul_(2)[:, 0] = -3.0
        head[list(LIKELY), 0] = -0.05 * torch.arange(len(LIKELY))
    policy.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="50GB")
    return directory


def write_untrained_drafter(policy_dir: Path, tokens: Sequence[int], directory: Path) -> Path:
    """Write a random EAGLE-3 drafter whose draft vocabulary is these tokens."""
    policy = AutoConfig.from_pretrained(policy_dir)
    shape = Eagle3Shape.from_policy(policy, len(tokens), None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = {name: tensor.to(shape.dtype) for name, tensor in Eagle3(shape).state_dict().items()}
    weights |= vocabulary_tensors(torch.tensor(tokens), shape.vocab_size)
    write_drafter(directory, config_dict(shape, policy, 0), weights.items())
    return directory
