"""The drafter as SGLang loads it: the EAGLE-3 directory, with the names and keys that SGLang reads.

Written for SGLang 0.5.23; older versions know neither the norms of EAGLE-3.1 nor several layers. SGLang leaves out
tensors that it has no place for without a word, so what it does not compute is refused here.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from specrl.artifacts import write_json
from specrl.export.card import ExportedDrafter
from specrl.models.directory import CONFIG_FILE, WEIGHTS_FILE
from specrl.models.drafters import LAYERS
from specrl.models.hf_io import TensorReader, write_tensors


def sglang_command(drafter: ExportedDrafter, directory: Path) -> str:
    """The command with which SGLang serves the policy with what `write_sglang` wrote."""
    options = {
        "--model-path": drafter.policy,
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(directory),
        "--speculative-num-steps": str(drafter.k),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(drafter.k + 1),
    }
    if (window := drafter.config.get("sliding_window")) is not None:
        # SGLang counts the positions before a token, and not the token's own.
        options["--speculative-draft-window-size"] = str(window - 1)
    words = [word for option in options.items() for word in option]
    return shlex.join(["python", "-m", "sglang.launch_server", *words])


def write_sglang(drafter: ExportedDrafter, directory: Path) -> None:
    """Write `directory` as SGLang loads it; raise ValueError if it would compute something else."""
    config = sglang_config(drafter.config, drafter.policy_config["num_hidden_layers"])
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {sglang_name(name): tensor for name, tensor in TensorReader(drafter.directory).items()}
    write_tensors(directory / WEIGHTS_FILE, tensors)
    write_json(directory / CONFIG_FILE, config)


def sglang_name(name: str) -> str:
    """The name that SGLang has for a tensor of the EAGLE-3 directory.

    The norm before the attention is called `hidden_norm` in all of its layers.
    """
    prefix, _, rest = name.partition(".input_layernorm.")
    return f"{prefix}.hidden_norm.{rest}" if rest and prefix.startswith("layers.") else name


def sglang_config(eagle3: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """SGLang's `config.json`, given the EAGLE-3 directory's and the number of the policy's layers; see `write_sglang`.

    SGLang names a feature by the layer that it leaves, in `eagle_config`, and not by the one that it enters.
    """
    layers = eagle3[LAYERS]
    reasons = {
        "norm_before_residual = true": eagle3["norm_before_residual"],
        "a single feature layer": len(layers) == 1,
        "the embeddings as a feature (layer 0)": layers[0] == 0,
        "the output of the policy's last layer as a feature": layers[-1] == num_layers,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ValueError(
            f"SGLang computes no drafter with {' or '.join(found)}; take --format eagle3 or speculators, which vLLM "
            "serves"
        )
    return {**eagle3, "eagle_config": {LAYERS: [layer - 1 for layer in layers], "use_aux_hidden_state": True}}
