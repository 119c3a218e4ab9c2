"""A tiny policy with experts, its drafter, and what transformers' routers choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from specrl.config import DrafterConfig, ModelConfig
from specrl.config.model import TinyModelConfig
from specrl.distributed import Ranks
from specrl.models.sources import materialise_model
from specrl.training.drafter.trainer import Drafter
from tests.exactness.toy import likely_tokens

LAYERS, EXPERTS, CHOSEN = 6, 8, 2
SIZES = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 64}


def write_expert_policy(directory: Path, seed: int = 0) -> Path:
    """A random Qwen3-MoE in FP32."""
    tiny = TinyModelConfig(family="qwen3_moe", **SIZES)
    model = ModelConfig(source="tiny", dtype="float32", max_length=192, tiny=tiny)
    return materialise_model(model, seed, directory)


def write_expert_drafter(directory: Path, policy_dir: Path) -> Path:
    """A random EAGLE-3 drafter."""
    alone = Ranks(0, 1, 0, torch.device("cpu"))
    Drafter.create(policy_dir, DrafterConfig(), torch.tensor(likely_tokens()), alone).save(directory, 0)
    return directory


@torch.no_grad()
def routes_of(policy_dir: Path, sequences: list[list[int]]) -> list[NDArray[Any]]:
    """The experts of all tokens but the last in ascending order, [tokens - 1, layers, experts per token]."""
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    found = []
    for tokens in sequences:
        logits = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(CHOSEN).indices.sort(-1).values for layer in logits], 1)
        found.append(chosen.numpy().astype(np.uint8))
    return found
