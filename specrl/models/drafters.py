"""Published EAGLE-3 drafters: the contents of a `config.json`, and whether it suits a policy. No torch here.

There are two layouts: that of vLLM and SGLang is a Llama's configuration with a few more keys; that of the
`speculators` library has a table for the decoder layer. Defaults, on which programs disagree, are vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specrl.config import Config, ConfigError
from specrl.config.base import prefixed
from specrl.models.checks.config import form_problems, rope_keys, rope_of, rope_problems
from specrl.models.directory import CONFIG_FILE, INDEX_FILE, read_model_config
from specrl.models.shapes import ModelShape
from specrl.models.sources import download, source_kind

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")  # specrl writes the first
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""See `training/drafter/kinds/eagle3.py`."""
PICKLED_FILE = "pytorch_model.bin"  # in drafters older than safetensors
FILES = ["config.json", "*.safetensors", INDEX_FILE, PICKLED_FILE]  # downloaded from the hub
MUST_BE = {
    "model_type": "llama",
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    **dict.fromkeys(("attention_bias", "mlp_bias", "parallel_drafting", "use_mtp_layernorm"), False),
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
}
"""The only values that trainer and engine compute alike."""
DEFAULTS = {"num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
"""The defaults of keys missing in a Llama's configuration; a drafter always has a layer."""
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")  # required in every drafter
LOSS_KEY = "specrl_loss"  # the loss with which specrl trained a drafter
LAYERS = "eagle_aux_hidden_state_layer_ids"  # the layers whose inputs are the features
SPECULATORS_KIND = "eagle3"  # the name of EAGLE-3 in `speculators`
OWN_KEYS = ("draft_vocab_size", "target_hidden_size", "quantization_config", *NORM_FLAGS)
"""The keys in a `config.json` of `speculators` that belong to the drafter and not to its decoder layer."""


@dataclass(frozen=True)
class PublishedDrafter:
    """The contents of an EAGLE-3 drafter's `config.json`, with defaults filled in."""

    layout: str
    config: dict[str, Any]
    """The keys of a Llama's configuration, the norm flags, `rope_parameters`, `draft_vocab_size` and, unless they are
    those of the first EAGLE-3, the feature layers.
    """
    notes: tuple[str, ...] = ()  # findings and decisions, as lines for the log


def find_source(config: Config) -> Path | None:
    """The folder of the drafter that the run adopts from `drafter.source`; None without one, and for a hub id."""
    source = config.drafter.source if config.adopts_drafter else None
    if source is None or source_kind(source, "drafter.source", names=()) != "directory":
        return None
    return Path(source)


def fetch_source(config: Config) -> Path:
    """The folder of `drafter.source`, downloaded from the hub if need be."""
    assert config.drafter.source is not None
    return find_source(config) or download("drafter.source", config.drafter.source, FILES)


def _known_source(config: Config) -> dict[str, Any] | None:
    try:
        directory = find_source(config)
        return None if directory is None else read_published(directory).config
    except ConfigError:  # reported when the drafter is checked
        return None


def with_source_sizes(config: Config) -> Config:
    """The configuration with the sizes of the drafter in `drafter.source`, if that can be read from here."""
    if (found := _known_source(config)) is None:
        return config
    sizes = {
        "draft_vocab_size": found["draft_vocab_size"],
        "num_layers": found["num_hidden_layers"],
        "feature_layers": tuple(found[LAYERS]) if LAYERS in found else None,
        "intermediate_size": found["intermediate_size"],
    }
    return config.updated(drafter=sizes)


def with_source_heads(config: Config, policy: ModelShape) -> ModelShape:
    """The policy's shape with the attention heads of the drafter in `drafter.source`, if it can be read from here."""
    if (found := _known_source(config)) is None:
        return policy
    heads, groups, size = (found[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    return replace(policy, num_heads=heads, num_kv_heads=groups, head_dim=size)


def has_window(directory: Path) -> bool:
    """Whether the drafter in a folder, of any layout, sees a sliding window of positions."""
    config = read_model_config(directory)
    config = {**config, **(config.get("transformer_layer_config") or {})}
    return "sliding_attention" in (config.get("layer_types") or ())


def check_source_drafter(config: Config, policy_dir: Path | None) -> None:
    """Check the drafter of `drafter.source` as far as possible without a download; `policy_dir` may be unknown."""
    if (directory := find_source(config)) is not None:
        check_drafter(directory, policy_dir)


def check_drafter(directory: Path, policy_dir: Path | None) -> None:
    """Check a drafter by its `config.json`."""
    with prefixed("drafter.source: "):
        published = read_published(directory)
        if policy_dir is not None:
            suited(published, read_model_config(policy_dir), directory)


def read_published(directory: Path) -> PublishedDrafter:
    """Read the `config.json` of an EAGLE-3 drafter."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"no drafter in {directory}: {CONFIG_FILE} is missing")
    found = read_model_config(directory)
    with prefixed(f"{path}: "):
        for table in (found, *(found.get(name) or {} for name in ("eagle_config", "transformer_layer_config"))):
            for problem in form_problems(table):
                raise ConfigError(problem)
        published = _of_speculators(found) if "speculators_model_type" in found else _original(found)
        _check_computed(published.config)
    return published


def _original(found: dict[str, Any]) -> PublishedDrafter:
    architecture = (found.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"architectures is [{architecture}]: no EAGLE-3 drafter with a Llama layer, whose architecture is "
            f"{' or '.join(ARCHITECTURES[:2])}"
        )
    nested: dict[str, Any] = found.get("eagle_config") or {}
    config = {**found, **{key: value for key, value in nested.items() if key != LAYERS}}
    layers, notes = found.get(LAYERS), list[str]()
    if not layers and nested.get(LAYERS):
        layers = [layer + 1 for layer in nested[LAYERS]]
        notes.append(
            f"its eagle_config names layers {nested[LAYERS]} by their outputs, as SGLang does: the inputs of layers "
            f"{layers}"
        )
    return PublishedDrafter("original", _filled(config, layers, norm_before_residual=False), tuple(notes))


def _of_speculators(found: dict[str, Any]) -> PublishedDrafter:
    kind = found["speculators_model_type"]
    if kind != SPECULATORS_KIND:
        raise ConfigError(f'speculators_model_type is "{kind}": it must be "{SPECULATORS_KIND}"')
    layer = found.get("transformer_layer_config") or {}
    config = {**layer, **{key: value for key, value in found.items() if key in OWN_KEYS}}
    filled = _filled(config, found.get(LAYERS), norm_before_residual=True)
    verifier = (found.get("speculators_config") or {}).get("verifier") or {}
    return PublishedDrafter("speculators", filled, (f"it was trained for {verifier.get('name_or_path')}",))


def _filled(config: dict[str, Any], layers: list[int] | None, *, norm_before_residual: bool) -> dict[str, Any]:
    filled = {**DEFAULTS, "norm_before_residual": norm_before_residual, **config}
    filled = {key: filled[key] if filled[key] is not None else DEFAULTS.get(key) for key in filled}
    heads = filled.get("num_attention_heads")
    if heads and filled.get("hidden_size"):
        filled["num_key_value_heads"] = filled.get("num_key_value_heads") or heads
        filled["head_dim"] = filled.get("head_dim") or filled["hidden_size"] // heads
    windowed = set(filled.get("layer_types") or ()) == {"sliding_attention"}
    filled["sliding_window"] = filled.get("sliding_window") if windowed else None
    filled["draft_vocab_size"] = filled.get("draft_vocab_size") or filled.get("vocab_size")
    partial = config.get("partial_rotary_factor")
    filled["partial_rotary_factor"] = rope_keys(config).get("partial_rotary_factor", partial)
    filled["rope_parameters"] = rope_of(config)
    filled |= {flag: bool(filled.get(flag)) for flag in NORM_FLAGS}
    if layers:
        filled[LAYERS] = list(layers)
    return filled


def _check_computed(config: Mapping[str, Any]) -> None:
    for key, wanted in MUST_BE.items():
        value = config.get(key)
        if value is not None and value != wanted:
            found = "{...}" if isinstance(value, dict) else repr(value)
            raise ConfigError(f"{key} = {found}: specrl computes drafters with {wanted!r} only")
    if len(types := set(config.get("layer_types") or ())) > 1:
        raise ConfigError(f"layer_types has {' and '.join(sorted(types))}: all of its layers must be alike")
    for problem in (*form_problems(config, SIZES), *rope_problems(config)):
        raise ConfigError(problem)


def suited(published: PublishedDrafter, policy: Mapping[str, Any], directory: Path) -> PublishedDrafter:
    """A drafter with feature layers, positions and rotary embedding that suit a policy's `config.json`.

    vLLM lets a drafter read sequences as long as the policy's, whatever its own `max_position_embeddings`. A drafter
    without YaRN drafts nothing useful beyond the original context of a policy with YaRN, so it gets the policy's.
    """
    config, notes = dict(published.config), [*published.notes]
    for key, wanted in (("hidden_size",) * 2, ("target_hidden_size", "hidden_size"), ("vocab_size",) * 2):
        if config.get(key) is not None and config[key] != policy[wanted]:
            raise ConfigError(
                f"drafter in {directory} has {key} = {config[key]}, and the policy has {wanted} = {policy[wanted]}: it "
                "was made for another policy"
            )
    config[LAYERS] = _suited_layers(config.get(LAYERS), policy["num_hidden_layers"], directory)
    rope, of_policy = config["rope_parameters"], rope_of(policy)
    if of_policy["rope_type"] == "yarn" and rope["rope_type"] == "default":
        config["rope_parameters"] = {**of_policy, "rope_theta": rope["rope_theta"]}
        factor = of_policy["factor"]
        notes.append(f"its rotary embedding is not scaled, the policy's is: it takes over YaRN with factor {factor:g}")
    if (theta := rope["rope_theta"]) != of_policy["rope_theta"]:
        notes.append(f"its rope_theta is {theta:g}, the policy's {of_policy['rope_theta']:g}; it keeps its own")
    longest = config["max_position_embeddings"]
    needed = policy.get("max_position_embeddings", longest)
    if longest < needed:
        config["max_position_embeddings"] = needed
        notes.append(f"its max_position_embeddings is {longest}, and becomes the policy's {needed}")
    return replace(published, config=config, notes=tuple(notes))


def _suited_layers(layers: list[int] | None, num_layers: int, directory: Path) -> list[int]:
    if layers is None:
        layers = [2, num_layers // 2, num_layers - 3]  # the default of all engines
    if any(not 0 <= layer <= num_layers for layer in layers) or layers != sorted(set(layers)):
        raise ConfigError(
            f"drafter in {directory} reads the inputs of layers {layers}: they must ascend, the order in which engines "
            f"read them, from 0 to {num_layers}, the number of the policy's layers"
        )
    return layers
