"""The drafter in the format of the `speculators` library, which vLLM serves with `vllm serve DIRECTORY` alone.

A drafter of all positions in one pass is of another kind there, `peagle`, with the same layers beside its mask.

It holds the tensors of the EAGLE-3 directory under the library's names, and its `config.json` names the policy. It has
the policy's embeddings too: version 0.9 of the library leaves them undefined where they are missing, and trains on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrl.artifacts import write_json
from specrl.export.card import ExportedDrafter
from specrl.models.directory import CONFIG_FILE, WEIGHTS_FILE
from specrl.models.drafters import LAYERS, NORM_FLAGS, SPECULATORS_KIND
from specrl.models.hf_io import TensorReader, write_tensors

# Keys of the EAGLE-3 directory's `config.json` that describe the drafter, and those that describe its decoder layer.
DRAFTER_KEYS = ("draft_vocab_size", "target_hidden_size", *NORM_FLAGS)
LAYER_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_aux_hidden_states",  # vLLM takes three unless this says otherwise
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
EMBEDDINGS = "embed_tokens.weight"
"""The name of the embeddings; in the policy it has a prefix."""
WINDOW_KEYS = ("sliding_window", "layer_types")
"""The keys of `config.json` that only a drafter with a sliding window has."""


def write_speculators(drafter: ExportedDrafter, directory: Path) -> None:
    """Write `directory` in the format of `speculators`; raise ValueError if it or vLLM could not load the drafter."""
    config = speculators_config(drafter)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in TensorReader(drafter.directory).items()
    }
    embeddings = TensorReader(drafter.policy_dir).read(f"model.{EMBEDDINGS}")
    tensors[EMBEDDINGS] = embeddings.to(tensors["lm_head.weight"].dtype)
    write_tensors(directory / WEIGHTS_FILE, tensors)
    write_json(directory / CONFIG_FILE, config)


def speculators_config(drafter: ExportedDrafter) -> dict[str, Any]:
    """The contents of the library's `config.json`; the errors are those of `write_speculators`."""
    eagle3 = drafter.config
    if eagle3["norm_before_fc"] and eagle3["fc_norm"]:
        raise ValueError(
            "speculators refuses a drafter with both norm_before_fc and fc_norm; take --format eagle3 or sglang"
        )
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": SPECULATORS_KIND,
        "speculators_config": {
            "algorithm": SPECULATORS_KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.k}],
            "verifier": {
                "name_or_path": drafter.policy,
                "architectures": drafter.policy_config.get("architectures", []),
            },
        },
        "transformer_layer_config": {
            **{key: eagle3[key] for key in LAYER_KEYS},
            **{key: eagle3[key] for key in WINDOW_KEYS if key in eagle3},
        },
        LAYERS: eagle3[LAYERS],
        "embed_requires_grad": False,
        **{key: eagle3[key] for key in DRAFTER_KEYS},
    }
