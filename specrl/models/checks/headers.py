"""The tensors in a folder's safetensors files, by their headers, and whether they are the model's. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.config.base import ConfigError, prefixed
from specrl.models.directory import (
    CONFIG_FILE,
    EMBEDDINGS,
    FINAL_NORM,
    HEAD,
    INDEX_FILE,
    LFS_POINTER,
    WEIGHTS_FILE,
    read_object,
    weight_files,
)
from specrl.models.families import expert_shape, family_of, num_mtp_layers
from specrl.models.mtp_modules import MTP_LAYERS

TYPES = {"F32": 4, "BF16": 2, "F16": 2}  # the types that trainer and engine read alike, and their bytes
LONGEST_HEADER = 100 * 2**20  # bytes, as in the safetensors library
COMPARED = 2**26  # bytes of two tensors compared at a time
SHOWN = 3  # tensors or files that a message names
DERIVED = r"rotary_emb\.inv_freq$"  # in old checkpoints, and never read
AGAIN = "download the folder again (hf download NAME --local-dir FOLDER)"
MERGE = "merge the adapter into its base model (merge_and_unload() of peft) and give the folder of the merged model"
CONVERT = (
    "convert them with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW), and the same "
    "with AutoTokenizer"
)
WITHOUT_WEIGHTS = {
    "adapter_*": f"it is an adapter: {MERGE}",
    "pytorch_model*.bin": f"its weights are pickled: {CONVERT}",
    "consolidated*": "its weights are in Meta's or Mistral's own layout: take the checkpoint for transformers",
    "*.gguf": f"its weights are GGUF: {CONVERT}, with gguf_file = the file's name",
    "*.h5": f"its weights are TensorFlow's: {CONVERT}, with from_tf = True",
    "*.msgpack": f"its weights are Flax's: {CONVERT}, with from_flax = True",
    "model-*-of-*.safetensors": f"it has no {INDEX_FILE}: {AGAIN}, or rename a single shard {WEIGHTS_FILE}",
    "*.safetensors": f"rename its one file of weights {WEIGHTS_FILE}",
    "global_step*": "it is DeepSpeed's own checkpoint: convert it with the zero_to_fp32.py in it",
    "*.distcp": "it is a sharded checkpoint: merge it with accelerate merge-weights",
    "model_world_size_*": "it is verl's own checkpoint: merge it with python -m verl.model_merger merge",
    "snapshots": "it is a folder of the hub's cache: give the folder within snapshots",
}
"""What a folder may contain instead of weights, and how to turn it into a model; the first match counts."""
QUANTISED = "it is quantised: use the checkpoint that it was made from, or dequantise it"
UNKNOWN = {
    r"^base_model\.|lora_": MERGE,
    r"scale|zero|qweight|absmax|quant|g_idx": QUANTISED,
    r"^(_orig_mod|module|_fsdp_wrapped_module)\.": "save the model itself, and not what a trainer wraps it in",
    r"experts\.(gate_up|down)_proj$": "its experts are stacked: save each expert's matrices by themselves",
    r"\.bias$": "the trainer has no such bias",
    r"^(embed_tokens|layers|norm)\.": "it was saved without its head: load and save it with AutoModelForCausalLM",
    r"^(v_head|score|value_head|summary)\.": "it is a reward or value model: use one that was saved without that head",
    r"visual|vision|audio|language_model": "only the language model of it can be trained: save that alone",
}
"""Why a model may have tensors beyond its `config.json`, by a pattern of their names."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of a file describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int]  # its first byte after the header, and the one after its last
    begin: int  # the length of the header


def check_weights(directory: Path, config: Mapping[str, Any]) -> None:
    """Check that a folder's files hold exactly the tensors of the model in its `config.json`."""
    with prefixed(f"model directory {directory} "):
        for problem in _differences(read_headers(directory), config):
            raise ConfigError(problem)


def _differences(stored: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> Iterator[str]:
    architecture, expected = family_of(config).architecture, tensor_shapes(config)
    tied_head = stored.get(HEAD) if config.get("tie_word_embeddings") else None
    known = {*expected, HEAD} if tied_head else {*expected}
    mtp = None if num_mtp_layers(config) else family_of(config).mtp
    spare = re.compile(rf"{DERIVED}|^{re.escape(mtp.prefix)}" if mtp else DERIVED)  # layers that are never read
    if unknown := sorted(name for name in stored if name not in known and not spare.search(name)):
        reasons = [why for pattern, why in UNKNOWN.items() for name in unknown if re.search(pattern, name)]
        if any(name.startswith(f"model.layers.{config['num_hidden_layers']}.") for name in unknown):
            reasons = [f"num_hidden_layers = {config['num_hidden_layers']} is too small for it"]
        why = reasons[0] if reasons else f"take another {CONFIG_FILE}, or {AGAIN}"
        yield f"has tensors that a {architecture} of its {CONFIG_FILE} has not ({_some(unknown)}): {why}"
    if missing := [name for name in expected if name not in stored]:
        why = AGAIN
        if missing == [HEAD]:
            why = "with tie_word_embeddings = false it must have a head; where that is the embeddings' matrix, set true"
        elif (mtp := family_of(config).mtp) is not None and all(name.startswith(mtp.prefix) for name in missing):
            why = f"take a checkpoint that has them, or set {MTP_LAYERS} = 0 in {CONFIG_FILE}"
        yield f"lacks tensors of a {architecture} of its {CONFIG_FILE} ({_some(missing)}): {why}"
    for name, shape in expected.items():
        tensor = stored[name]
        if tensor.dtype not in TYPES:
            why = "save it in one of these or, where it is quantised, use the checkpoint that it was made from"
            yield f"has {name} in {tensor.dtype}, and not in one of {', '.join(TYPES)}: {why}"
        if tensor.shape != shape:
            own = f"has {name} of shape {list(tensor.shape)}"
            yield f"{own}, and its {CONFIG_FILE} says {list(shape)}: correct that, or {AGAIN}"
        if tensor.span[1] - tensor.span[0] != math.prod(shape) * TYPES[tensor.dtype]:
            yield f"has {name} in {tensor.span[1] - tensor.span[0]} bytes, not those of its type and shape: {AGAIN}"
    if tied_head and not _are_equal(tied_head, stored[EMBEDDINGS]):
        yield (
            f"has {HEAD} that differs from {EMBEDDINGS}, and tie_word_embeddings = true would leave it out: set "
            "tie_word_embeddings = false"
        )


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a checkpoint has, by name, given the contents of its `config.json`."""
    hidden, vocabulary = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    shapes: dict[str, tuple[int, ...]] = {EMBEDDINGS: vocabulary, FINAL_NORM: (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes[HEAD] = vocabulary
    layer = _layer_shapes(config)
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    if (mtp := family_of(config).mtp) is not None:
        norms = ["token", "hidden", *(["final"] if mtp.final_norm else [])]
        own = layer | {"input_proj.weight": (hidden, 2 * hidden)} | {f"{n}_layernorm.weight": (hidden,) for n in norms}
        for number in range(num_mtp_layers(config)):
            shapes |= {mtp.name_on_disk(name, number): shape for name, shape in own.items()}
    return shapes


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    family, hidden, heads = family_of(config), config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
    experts = expert_shape(config)
    inner = experts.intermediate_size if experts else config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    if family.qk_norm:
        shapes |= {f"self_attn.{letter}_norm.weight": (head,) for letter in "qk"}
    for linear in family.linears:
        rows = {"qkv": (queries, keys, keys), "gate_up": (inner, inner), "columns": (hidden,)}[linear.layout]
        columns = hidden if linear.layout != "columns" else queries if linear in family.attention else inner
        for part, height in zip(linear.parts, rows, strict=True):
            numbers = range(experts.num_experts) if experts and linear.is_expert else (0,)
            shapes |= {f"{part.format(expert=number)}.weight": (height, columns) for number in numbers}
            if linear.layout == "qkv" and family.qkv_bias:
                shapes[f"{part}.bias"] = (height,)
    if family.router is not None and experts is not None:
        shapes[f"{family.router.hf}.weight"] = (experts.num_experts, hidden)
    return shapes


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """All tensors in the files of weights of a folder, by name."""
    names = weight_files(directory)
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ConfigError(_why_missing(directory, names, missing))
    others = {path.name for path in directory.glob("*.safetensors")} - {*names}
    others |= {"adapter_config.json"} if (directory / "adapter_config.json").exists() else set()
    if others := {name for name in others if not name.startswith("consolidated")}:
        reason = MERGE if any(name.startswith("adapter") for name in others) else "remove what is not of the model"
        raise ConfigError(f"has {_some(sorted(others))} beside {_some(names)}, which would not be read: {reason}")
    stored = {name: tensor for file in names for name, tensor in _header(directory / file).items()}
    if (directory / INDEX_FILE).is_file():
        listed = read_object(directory / INDEX_FILE)["weight_map"]
        if wrong := [name for name, file in listed.items() if name not in stored or stored[name].file.name != file]:
            raise ConfigError(f"lacks tensors where {INDEX_FILE} lists them ({_some(wrong)}): {AGAIN}")
    return stored


def _why_missing(directory: Path, names: list[str], missing: list[str]) -> str:
    lost = f"lacks {_some(missing)}"
    if any((directory / name).is_symlink() for name in missing):
        return f"{lost}: links to files that are not there; {AGAIN}"
    if (directory / INDEX_FILE).is_file():
        whole = (directory / WEIGHTS_FILE).is_file() and WEIGHTS_FILE not in names
        stale = f"; if {WEIGHTS_FILE} is the whole model, remove {INDEX_FILE}" if whole else ""
        return f"{lost}, {len(missing)} of the {len(names)} files that {INDEX_FILE} names: {AGAIN}{stale}"
    return f"{lost}: {remedy(directory)}"


def remedy(directory: Path, *, has_config: bool = True) -> str:
    """How to turn a folder without weights or `config.json` into a model."""
    rows = [row for row in WITHOUT_WEIGHTS.items() if has_config or not row[0].endswith(".safetensors")]
    return next((why for pattern, why in rows if any(directory.glob(pattern))), AGAIN)


def _header(path: Path) -> dict[str, StoredTensor]:
    size, name = path.stat().st_size, path.name
    with path.open("rb") as file:
        start = file.read(8)
        if start == LFS_POINTER[:8].encode():
            raise ConfigError(f"has a Git LFS pointer in place of {name}: run `git lfs pull` in it")
        begin = 8 + int.from_bytes(start, "little")
        if len(start) < 8 or not 8 < begin <= min(LONGEST_HEADER, size):
            raise ConfigError(f"has a {name} of {size} bytes that is no safetensors file, or its beginning: {AGAIN}")
        try:
            table = json.loads(file.read(begin - 8))
            tensors = {
                key: StoredTensor(path, entry["dtype"], tuple(entry["shape"]), tuple(entry["data_offsets"]), begin)
                for key, entry in table.items()
                if key != "__metadata__"
            }
            end = begin + max((tensor.span[1] for tensor in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"has a {name} whose header is damaged: {AGAIN}") from error
    if size != end:
        raise ConfigError(f"has a {name} of {size} bytes, which must be {end}: its download is incomplete; {AGAIN}")
    return tensors


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.begin + first.span[0])
        other.seek(second.begin + second.span[0])
        sizes = range(first.span[1] - first.span[0], 0, -COMPARED)
        return all(one.read(min(left, COMPARED)) == other.read(min(left, COMPARED)) for left in sizes)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
