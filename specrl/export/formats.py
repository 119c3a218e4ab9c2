"""The export formats of a drafter, each converted from the EAGLE-3 directory that specrl writes.

SGLang (0.5.23; older versions support neither the norms of EAGLE-3.1 nor several layers) silently ignores tensors that
it does not know, so unsupported drafters are refused here. The format of the `speculators` library includes the
policy's embeddings, because version 0.9 leaves missing ones undefined.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specrl.artifacts import write_json
from specrl.config import ConfigError
from specrl.export.card import ExportedDrafter, serve_arguments, window_options
from specrl.models.directory import CONFIG_FILE, WEIGHTS_FILE
from specrl.models.drafters import LAYERS, LOSS_KEY, NORM_FLAGS, SPECULATORS_KIND
from specrl.models.hf_io import TensorReader, write_tensors


def sglang_command(drafter: ExportedDrafter, directory: Path) -> str:
    """The SGLang command that serves the policy with a folder in this format."""
    options = {
        "--model-path": drafter.policy,
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(directory),
        "--speculative-num-steps": str(drafter.k),
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": str(drafter.k + 1),
    }
    if (window := drafter.config.get("sliding_window")) is not None:
        # SGLang does not count the token's own position.
        options["--speculative-draft-window-size"] = str(window - 1)
    words = [word for option in options.items() for word in option]
    return shlex.join(["python", "-m", "sglang.launch_server", *words])


def sglang_tensors(drafter: ExportedDrafter) -> dict[str, Tensor]:
    return {sglang_name(name): tensor for name, tensor in TensorReader(drafter.directory).items()}


def sglang_name(name: str) -> str:
    """SGLang's name of a tensor: in all layers, it calls the norm before the attention `hidden_norm`."""
    prefix, _, rest = name.partition(".input_layernorm.")
    return f"{prefix}.hidden_norm.{rest}" if rest and prefix.startswith("layers.") else name


def sglang_config(eagle3: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """SGLang's `config.json`, made from the EAGLE-3 directory's and the number of the policy's layers.

    In `eagle_config`, SGLang names a feature by the layer that outputs it, not by the one that reads it.
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


DRAFTER_KEYS = ("draft_vocab_size", "target_hidden_size", *NORM_FLAGS)
"""Keys of the EAGLE-3 directory's `config.json` that describe the drafter; most others describe its decoder layer."""
LEFT_OUT = ("architectures", "bos_token_id", "eos_token_id", "rope_scaling", "specrl_policy_version", LOSS_KEY, LAYERS)
EMBEDDINGS = "embed_tokens.weight"  # the policy's has a prefix


def speculators_tensors(drafter: ExportedDrafter) -> dict[str, Tensor]:
    own = TensorReader(drafter.directory).items()
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in own}
    embeddings = TensorReader(drafter.policy_dir).read(f"model.{EMBEDDINGS}")
    return tensors | {EMBEDDINGS: embeddings.to(tensors["lm_head.weight"].dtype)}


def speculators_config(drafter: ExportedDrafter) -> dict[str, Any]:
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
            key: value for key, value in eagle3.items() if key not in (*DRAFTER_KEYS, *LEFT_OUT)
        },
        LAYERS: eagle3[LAYERS],
        "embed_requires_grad": False,
        **{key: eagle3[key] for key in DRAFTER_KEYS},
    }


@dataclass(frozen=True)
class Format:
    config: Callable[[ExportedDrafter], dict[str, Any]]  # ValueError if the format does not support the drafter
    tensors: Callable[[ExportedDrafter], dict[str, Tensor]]
    command: Callable[[ExportedDrafter, Path], str]  # the command that serves the folder

    def write(self, drafter: ExportedDrafter, directory: Path) -> None:
        """Write a new folder; ValueError if the library that loads it would compute something else, or nothing."""
        config = self.config(drafter)
        directory.mkdir(parents=True, exist_ok=True)
        write_tensors(directory / WEIGHTS_FILE, self.tensors(drafter))
        write_json(directory / CONFIG_FILE, config)


FORMATS: dict[str, Format] = {
    "eagle3": Format(
        lambda own: own.config,
        lambda own: dict(TensorReader(own.directory).items()),
        lambda own, folder: shlex.join(serve_arguments(own.policy, folder, own.k)),
    ),
    "speculators": Format(
        speculators_config,
        speculators_tensors,
        lambda _, folder: shlex.join(["vllm", "serve", str(folder), *window_options(folder)]),
    ),
    "sglang": Format(
        lambda own: sglang_config(own.config, own.policy_config["num_hidden_layers"]), sglang_tensors, sglang_command
    ),
}
"""The formats; `eagle3` is the original layout, which vLLM loads."""


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(f"--format {name}: allowed are {', '.join(FORMATS)}, and policy")
    return FORMATS[name]
