"""The drafter in the format of the `speculators` library, which vLLM serves with `vllm serve DIRECTORY` alone.

It holds the tensors of the EAGLE-3 directory under the library's names, and its `config.json` names the policy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrl.artifacts import write_json
from specrl.models.directory import CONFIG_FILE, WEIGHTS_FILE
from specrl.models.hf_io import TensorReader, write_tensors

# Keys of the EAGLE-3 directory's `config.json` that describe the drafter, and those that describe its decoder layer.
DRAFTER_KEYS = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "target_hidden_size")
LAYER_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "torch_dtype",
)


def write_speculators(eagle3_dir: Path, directory: Path, policy: str, k: int) -> None:
    """Write `directory` in the format of `speculators`, converted from an EAGLE-3 directory.

    Args:
        policy: The directory or hub id of the policy, as the serving side will name it.
        k: The number of draft tokens per iteration that `config.json` recommends.
    """
    eagle3 = json.loads((eagle3_dir / CONFIG_FILE).read_text())
    directory.mkdir(parents=True, exist_ok=True)
    tensors = TensorReader(eagle3_dir).items()
    write_tensors(
        directory / WEIGHTS_FILE, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors}
    )
    write_json(directory / CONFIG_FILE, speculators_config(eagle3, policy, k))


def speculators_config(eagle3: dict[str, Any], policy: str, k: int) -> dict[str, Any]:
    """Return the contents of the library's `config.json`, given those of the EAGLE-3 directory's.

    Args:
        policy: The directory or hub id of the policy.
        k: The number of draft tokens per iteration that it recommends.
    """
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": {"name_or_path": policy, "architectures": []},
        },
        "transformer_layer_config": {key: eagle3[key] for key in LAYER_KEYS},
        "eagle_aux_hidden_state_layer_ids": eagle3["eagle_aux_hidden_state_layer_ids"],
        "embed_requires_grad": False,
        **{key: eagle3[key] for key in DRAFTER_KEYS},
    }
