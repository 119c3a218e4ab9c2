"""The checks that trainer, engine and exporter compute a model's `config.json` alike, without importing torch.

The engine reads the same keys, so any setting not known to mean the same to both is refused here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from specrl.config import ConfigError
from specrl.models.families import Family, expert_shape, family_of

_SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size max_position_embeddings"
ORIGINAL = "original_max_position_embeddings"
_OTHERS = "num_key_value_heads head_dim num_experts num_local_experts num_experts_per_tok moe_intermediate_size"
EOS = "eos_token_id"
TOKEN_IDS = ("bos_token_id", EOS, "pad_token_id")  # programs look them up in the embeddings
DTYPES = ("float32", "bfloat16", "float16")
_LISTED_TOKENS = "extra_special_tokens additional_special_tokens"
_POSITIVE = "rms_norm_eps rope_theta model_max_length"
_TABLES = "rope_scaling rope_parameters quantization_config compression_config auto_map "
_TABLES += "eagle_config transformer_layer_config speculators_config"
_FEATURES = "eagle_aux_hidden_state_layer_ids"  # of a drafter
_OTHER_COUNTS = "num_nextn_predict_layers moe_layer_start_index max_window_layers sliding_window draft_vocab_size"
_SWITCHES = "tie_word_embeddings norm_topk_prob attention_bias mlp_bias use_cache use_sliding_window"
_GIVEN = f"hidden_act rms_norm_eps initializer_range attention_dropout max_window_layers auto_map {ORIGINAL}"
NEVER_NULL = {*_SWITCHES.split(), *_GIVEN.split()}
FORMS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("a whole number above 0", lambda value: type(value) is int and value > 0, f"{_SIZES} {_OTHERS} {ORIGINAL}"),
    ("a whole number from 0 on", lambda value: type(value) is int and value >= 0, _OTHER_COUNTS),
    ("a number above 0", lambda value: type(value) in (int, float) and 0 < value < math.inf, _POSITIVE),
    ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1, "attention_dropout"),
    ("a decimal from 0.0 to 1.0", lambda value: type(value) is float and 0 <= value <= 1, "initializer_range"),
    ("true or false", lambda value: type(value) is bool, _SWITCHES),
    ('"silu"', lambda value: type(value) is str, "hidden_act"),
    ("one of " + ", ".join(DTYPES), lambda value: value in DTYPES, "dtype torch_dtype"),
    ("a text or an object", lambda value: type(value) in (str, dict), "bos_token eos_token pad_token unk_token"),
    ("a list", lambda value: type(value) is list, "architectures layer_types mlp_layer_types mlp_only_layers"),
    ("a list of whole numbers", lambda value: type(value) is list and {*map(type, value)} <= {int}, _FEATURES),
    ("an object", lambda value: type(value) is dict, _TABLES),
    ("a list or an object", lambda value: type(value) in (list, dict), _LISTED_TOKENS),
    ('"left" or "right"', lambda value: value in ("left", "right"), "padding_side truncation_side"),
    (
        "an object with an object for the number of each token",
        lambda value: type(value) is dict and all(key.isdecimal() and type(value[key]) is dict for key in value),
        "added_tokens_decoder",
    ),
)
"""The required form of keys' values if given; null is allowed except for `NEVER_NULL`."""
_ROPE = "rope_theta factor low_freq_factor high_freq_factor attention_factor beta_fast beta_slow"
ROPE_KEYS = f"{_ROPE} mscale mscale_all_dim truncate {ORIGINAL}".split()
ROPE_KINDS = {"default": "", "linear": "factor", "llama3": "factor low_freq_factor high_freq_factor", "yarn": "factor"}
"""The kinds that trainer and engine compute alike, and the keys that each requires."""


def check_config(config: Mapping[str, Any]) -> Family:
    """The family of a model; refuses a `config.json` that trainer, engine or exporter would not compute alike."""
    family = family_of(config)
    for problem in chain(_size_problems(config, family), _setting_problems(config, family), rope_problems(config)):
        raise ConfigError(problem)
    expert_shape(config)  # refuses a mix of layers with and without experts
    return family


def _size_problems(config: Mapping[str, Any], family: Family) -> list[str]:
    lines = form_problems(config, {*_SIZES.split(), *family.stated, *(NEVER_NULL & config.keys())})
    if lines:
        return lines
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if heads % (groups := config.get("num_key_value_heads") or heads):
        lines.append(f"num_key_value_heads = {groups} must divide num_attention_heads = {heads}")
    if not config.get("head_dim") and hidden % heads:
        lines.append(f"num_attention_heads = {heads} must divide hidden_size = {hidden}, or head_dim must be given")
    return lines + token_problems(config, config["vocab_size"])


def form_problems(config: Mapping[str, Any], needed: Collection[str] = ()) -> list[str]:
    """A line for each key whose value violates `FORMS`; null counts as absent unless the key is `needed`."""
    return [
        f"{key} = {_json(config.get(key))}: it must be {form}"
        for form, is_right, keys in FORMS
        for key in keys.split()
        if (key in needed or config.get(key) is not None) and not is_right(config.get(key))
    ]


def token_problems(config: Mapping[str, Any], vocab_size: int) -> list[str]:
    """A line for each special token of a `config.json` or `generation_config.json` that the embeddings lack."""
    lines: list[str] = []
    for key in TOKEN_IDS:
        given = config.get(key)
        for token in given if isinstance(given, list) and key == EOS else [given]:
            if given is None or (token == -1 and key != EOS):  # old checkpoints use -1 for none
                continue
            if type(token) is not int or token < 0:
                lines.append(f"{key} = {_json(given)}: it must be the number of a token, or null")
            elif token >= vocab_size:
                lines.append(f"{key} = {token} lies beyond the embeddings, which have vocab_size = {vocab_size} rows")
    return lines


def _setting_problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    of = f"is not supported in a {family.architecture}"
    if config.get("quantization_config") or config.get("compression_config"):
        table = config.get("quantization_config") or config["compression_config"]
        method = table.get("quant_method", "a method that is not named")
        yield (
            f"quantization_config with quant_method = {_json(method)} {of}: weights must be in F32, BF16 or F16; "
            "use the checkpoint that it was made from, or dequantise it"
        )
    listed = dict(family.every_layer)
    if "layer_types" not in listed and config.get("sliding_window") and config.get("use_sliding_window") is None:
        yield f"sliding_window = {_json(config['sliding_window'])} {of}: use a checkpoint with full attention (null)"
    for key, entry in ({"layer_types": "full_attention"} | listed).items():
        found = config.get(key) or (["none given"] if key in listed else [])
        if other := [value for value in found if value != entry]:
            where = f"in {len(other)} of {len(found)} layers"
            yield f'{key} = "{other[0]}" {where} {of}: it must be "{entry}" in all of them'
        if config.get(key) is not None and len(found) != config["num_hidden_layers"]:
            yield f"{key} has {len(found)} entries, and num_hidden_layers = {config['num_hidden_layers']}"
    if config.get("tie_word_embeddings") and not family.can_tie:
        yield f"tie_word_embeddings = true {of}: vLLM needs its output layer in the checkpoint"
    layers = config["num_hidden_layers"]
    if (start_key := family.experts_from) is not None and (start := config.get(start_key) or 0) < layers:
        must = f"no layer may have experts, so it must be at least num_hidden_layers = {layers}"
        yield f"{start_key} = {start} {of}: {must}"
    for key, allowed in _settings(family).items():
        if (value := config.get(key)) is not None and value != allowed:
            yield f"{key} = {_json(value)} {of}: use a checkpoint with {key} = {_json(allowed)}"
    if family.mtp is not None and rope_of(config)["rope_type"] != "default":
        yield f"{_rope_key(config)} {of}: remove the scaling, with which vLLM and the trainer would draft differently"
    if not family.ignored_keys and config.get("model_type") != family.model_type:
        yield f"model_type = {_json(config.get('model_type'))} {of}: it must be {_json(family.model_type)}"


def _settings(family: Family) -> dict[str, Any]:
    return {
        **dict.fromkeys(("attention_bias", "qkv_bias"), family.qkv_bias),
        **dict.fromkeys(("attention_out_bias", "mlp_bias", "use_bias", "bias", "use_sliding_window"), False),
        **dict.fromkeys(("logit_scale", "partial_rotary_factor", "rotary_pct", "rotary_emb_fraction"), 1.0),
        **dict.fromkeys(("rotary_emb_base", "dual_chunk_attention_config"), None),
        "hidden_act": "silu",
        "qk_norm": family.qk_norm,
        "is_causal": True,
    }


def _json(value: object) -> str:
    return json.dumps(value, default=str)[:80]


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """A model's rotary embedding as transformers 5 writes `rope_parameters`, given a `config.json` of any version."""
    found = rope_keys(config)
    kind = found.get("rope_type") or "default"
    theta = next((value for value in (found.get("rope_theta"), config.get("rope_theta")) if value is not None), 1e4)
    rope = {key: found[key] for key in ROPE_KEYS if found.get(key) is not None}
    if kind not in ("default", "linear"):
        rope[ORIGINAL] = config.get(ORIGINAL) or rope.get(ORIGINAL) or config.get("max_position_embeddings")
    return {**rope, "rope_type": kind, "rope_theta": float(theta)}


def rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The table of rotary embeddings in a `config.json`, as transformers reads it: an older one takes precedence."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return {**found, "rope_type": found["type"]} if found.get("type") else dict(found)


def _rope_key(config: Mapping[str, Any]) -> str:
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    return f"{key} with rope_type = {_json(rope_keys(config).get('rope_type') or 'default')}"


def rope_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key of rotary embeddings that trainer and engine would not compute alike."""
    found, where = rope_keys(config), _rope_key(config)
    kind = found.pop("rope_type", None) or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        yield f"{where}: supported are {', '.join(ROPE_KINDS)}; without it the model works up to its original length"
        return
    needed = ROPE_KINDS[kind].split()
    for key in dict.fromkeys((*found, *needed)):
        value: Any = found.get(key)
        if key in ("type", "truncate") or (value is None and key not in needed):
            continue
        if key == "partial_rotary_factor" and value != 1.0:
            yield f"{where} has {key} = {_json(value)}: rotary embeddings must cover the whole head"
        elif key not in (*ROPE_KEYS, "partial_rotary_factor"):
            yield f"{where} has {key}, which is not supported"
        elif type(value) not in (int, float) or not 0 < value < math.inf:
            yield f"{where} has {key} = {_json(value)}: it must be a number above 0"
