"""EAGLE-3 drafters as others publish them: random ones for a policy, of other sizes than a new drafter's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from specrl.models.directory import CONFIG_FILE, WEIGHTS_FILE, read_model_config
from specrl.models.drafters import ARCHITECTURES, LAYERS, read_published, suited
from specrl.training.drafter.kinds.eagle3 import Eagle3, Eagle3Shape

SHARED = (
    *("hidden_size", "vocab_size", "rms_norm_eps", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads"),
)
"""What its `config.json` takes from the policy's."""
EAGLE_3_1 = ("fc_norm", "norm_output")
"""The norms of EAGLE-3.1."""
FIRST_NORMS = ("norm_before_residual", "norm_before_fc")
"""Those of drafters between EAGLE-3 and EAGLE-3.1."""


def write_published(directory: Path, policy_dir: Path, norms: Sequence[str], draft_tokens: Sequence[int]) -> Path:
    """Write a random drafter in the original layout, whose `d2t` holds token ids.

    Args:
        norms: The norm flags that are on.
        draft_tokens: The ids of its draft vocabulary, ascending.
    """
    directory.mkdir(parents=True)
    policy = read_model_config(policy_dir)
    config = {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        **{key: policy[key] for key in SHARED},
        "intermediate_size": policy["intermediate_size"] // 2,
        "num_hidden_layers": 1,
        "draft_vocab_size": len(draft_tokens),
        LAYERS: [0, 3],
        **dict.fromkeys(norms, True),
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config))
    found = suited(read_published(directory), policy, directory).config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        tensors = Eagle3(Eagle3Shape.from_config(found, torch.float32)).state_dict()
    ids = torch.tensor(draft_tokens)
    is_drafted = torch.zeros(policy["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    save_file({**tensors, "d2t": ids, "t2d": is_drafted}, directory / WEIGHTS_FILE)
    return directory
