"""The small runs whose memory is measured, each of another make-up."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specrl.config import Config, parse_config
from specrl.models.tiny import write_tiny_model
from specrl.training.batches import MicroBatch, TokenSequence, pack

PROMPT_TOKENS = 4
"""The length of the prompts."""


@dataclass(frozen=True)
class Size:
    """One small run."""

    name: str
    tiny: dict[str, Any]
    """The entries of `model.tiny`."""
    vocab_size: int
    dtype: str
    length: int
    """`model.max_length`, which every sequence has."""
    sequences: int
    """The number of sequences in a micro-batch, and of responses in the step."""
    recompute: bool = False
    draft_vocab_size: int = 64

    @property
    def words(self) -> str:
        """The size in words."""
        return (
            f"hidden {self.tiny['hidden_size']}, vocabulary {self.vocab_size}, {self.dtype}, "
            f"{self.sequences} sequences of {self.length} tokens"
        )


SIZES = (
    Size(
        "llama, short sequences",
        {"family": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "num_kv_heads": 2},
        vocab_size=4096,
        dtype="bfloat16",
        length=128,
        sequences=8,
        draft_vocab_size=512,
    ),
    Size(
        "qwen3, long sequences, recompute",
        {"family": "qwen3", "hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 2},
        vocab_size=8192,
        dtype="bfloat16",
        length=512,
        sequences=2,
        recompute=True,
        draft_vocab_size=512,
    ),
    Size(
        "qwen3_moe, float32",
        {"family": "qwen3_moe", "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "moe_intermediate_size": 256},
        vocab_size=2048,
        dtype="float32",
        length=192,
        sequences=4,
    ),
)
"""What `specrl bench plan` measures: dense and with experts, both types, much activation and little."""


def write_policy(size: Size, directory: Path) -> Config:
    """Write a random policy of this size as a Hugging Face directory, and return the configuration of its run."""
    model = {"max_length": size.length, "dtype": size.dtype}
    tiny = parse_config({"name": "plan", "model": {"source": "tiny", "tiny": size.tiny, **model}, **_others(size)})
    write_tiny_model(tiny.model, 0, directory)
    hf = AutoConfig.from_pretrained(directory)
    hf.vocab_size = size.vocab_size
    AutoModelForCausalLM.from_config(hf, dtype=getattr(torch, size.dtype)).save_pretrained(directory)
    return parse_config({"name": "plan", "model": {"source": str(directory), **model}, **_others(size)})


def _others(size: Size) -> dict[str, Any]:
    """Return the sections of the configuration beside `model`."""
    tokens = size.sequences * size.length
    return {
        "sampling": {"max_response_tokens": size.length - PROMPT_TOKENS},
        "engine": {"max_num_seqs": size.sequences, "kv_cache_gib": 0.03},
        "policy": {"tokens_per_micro_batch": tokens, "recompute": size.recompute},
        "drafter": {"draft_vocab_size": size.draft_vocab_size, "max_tokens_per_step": tokens},
        "train": {"prompts_per_step": size.sequences // 2, "samples_per_prompt": 2},
    }


def random_batches(size: Size) -> list[MicroBatch]:
    """Return one micro-batch of random tokens, whose sequences all have the full length."""
    generator = random.Random(0)
    rows = [[generator.randrange(4, size.vocab_size) for _ in range(size.length)] for _ in range(size.sequences)]
    sequences = [TokenSequence(row, PROMPT_TOKENS, index) for index, row in enumerate(rows)]
    return pack(sequences, size.sequences * size.length)
