"""The EAGLE-3 directory that vLLM loads: `config.json` and `model.safetensors`; and other published layouts.

The written `d2t` holds *offsets*: target id = draft id + d2t[draft id]. Flags whose defaults differ between loaders
(norms, biases) are always written. Any layout of `specrl.models.drafters` can be read. A drafter with the policy's
whole vocabulary has no mappings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from specrl.artifacts import write_json
from specrl.models.directory import CONFIG_FILE, WEIGHTS_FILE, read_model_config, weight_files
from specrl.models.drafters import ARCHITECTURES, LAYERS, PICKLED_FILE, read_published, suited
from specrl.models.hf_io import TensorReader, write_tensors
from specrl.training.drafter.kinds.eagle3 import EAGLE3_KEYS, Eagle3, Eagle3Shape

MAPPINGS = ("d2t", "t2d")
NEW_NAMES = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
"""Parts of names in other programs, and the names used here."""
UPPER_NORM = re.compile(r"(layers\.\d+)\.hidden_norm\.")
"""SGLang's name for the norm before the attention of a layer above the first."""
EMBEDDINGS = "embed_tokens.weight"
NOT_READ = ("verifier_lm_head.", "verifier_norm.", "rotary_emb.", "midlayer.self_attn.rotary_emb.")
"""The name prefixes of tensors that belong to the policy or follow from `config.json`."""


def vocabulary_tensors(draft_tokens: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t`, int64 `[draft_vocab]`, and `t2d`, bool `[vocab]`, as they are stored on disk."""
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool, device=draft_tokens.device)
    is_drafted[draft_tokens] = True
    return {"d2t": draft_tokens - torch.arange(len(draft_tokens), device=draft_tokens.device), "t2d": is_drafted}


def check_offsets(d2t: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless every draft token maps to a token of the policy, as vLLM and SGLang read `d2t`.

    They add `d2t` to the draft token's id without checking the sum: one beyond the vocabulary is a bare IndexError on
    CPUs, and destroys the CUDA context on GPUs.
    """
    targets = d2t.long() + torch.arange(len(d2t), device=d2t.device)  # [draft_vocab]
    outside = ((targets < 0) | (targets >= vocab_size)).nonzero()[:, 0]
    if len(outside):
        first = int(outside[0])
        raise ValueError(
            f"d2t[{first}] = {int(d2t[first])} makes draft token {first} token {int(targets[first])} of the policy, "
            f"and allowed are 0 to {vocab_size - 1}: d2t must hold offsets, a token's id less that of its draft token"
        )


def config_dict(shape: Eagle3Shape, policy_config: Any, policy_version: int) -> dict[str, Any]:
    """The contents of a drafter's `config.json`, given transformers' configuration of the policy."""
    rope = dict(shape.rope)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}  # as transformers 4 reads it
    window = {"sliding_window": shape.sliding_window, "layer_types": ["sliding_attention"] * shape.num_layers}
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        **{key: getattr(shape, name) for name, key in EAGLE3_KEYS.items()},
        "hidden_act": "silu",
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        **({"rope_scaling": scaling} if rope["rope_type"] != "default" else {}),
        "bos_token_id": policy_config.bos_token_id,
        "eos_token_id": policy_config.eos_token_id,
        "torch_dtype": str(shape.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "target_hidden_size": shape.hidden_size,
        "num_aux_hidden_states": len(shape.feature_layers),
        LAYERS: list(shape.feature_layers),
        "specrl_policy_version": policy_version,
        **(window if shape.sliding_window is not None else {}),
    }


def write_drafter(directory: Path, config: dict[str, Any], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write an EAGLE-3 directory; `config.json` comes last, so that a directory with one is complete."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).unlink(missing_ok=True)
    write_tensors(directory / WEIGHTS_FILE, dict(weights))
    write_json(directory / CONFIG_FILE, config)


@dataclass(frozen=True)
class StoredDrafter:
    """A stored EAGLE-3 drafter, under specrl's names and with its shape."""

    shape: Eagle3Shape
    tensors: dict[str, Tensor]
    """The parameters of `Eagle3` by their names, in the types they have on disk."""
    draft_tokens: Tensor
    """int64 `[draft_vocab]`: the target ids of its draft vocabulary, ascending."""
    notes: tuple[str, ...]


def read_drafter(directory: Path, policy_dir: Path, dtype: torch.dtype = torch.bfloat16) -> StoredDrafter:
    """Read an EAGLE-3 drafter of any layout for a policy of this dtype, whose embeddings replace the drafter's.

    Raises ValueError if it is incomplete, needs unsupported operations, or was made for a policy of another shape.
    """
    published = suited(read_published(directory), read_model_config(policy_dir), directory)
    tensors = _norms_renamed(dict(_tensors(directory)))
    notes = [f"{directory}: an EAGLE-3 drafter in the {published.layout} layout", *published.notes]
    if EMBEDDINGS in tensors:
        notes.append(_about_embeddings(tensors.pop(EMBEDDINGS), policy_dir))
    d2t, t2d = (tensors.pop(name, None) for name in MAPPINGS)
    shape = Eagle3Shape.from_config(published.config, dtype)
    draft_tokens, how = draft_vocabulary(d2t, t2d, shape, directory)
    _check_tensors(tensors, shape, directory)
    ascending = draft_tokens.argsort()
    if not torch.equal(draft_tokens[ascending], draft_tokens):
        draft_tokens = draft_tokens[ascending]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][ascending]
    return StoredDrafter(shape, tensors, draft_tokens, (*notes, how))


def draft_vocabulary(d2t: Tensor | None, t2d: Tensor | None, shape: Eagle3Shape, directory: Path) -> tuple[Tensor, str]:
    """The target ids of a draft vocabulary, int64 `[draft_vocab]`, and how they were stored.

    `d2t` holds offsets or the ids themselves. `t2d` shows which; without it, only one reading gives distinct tokens,
    because the draft vocabulary contains many neighbouring tokens, whose offsets are equal.
    """
    if d2t is None and shape.draft_vocab_size == shape.vocab_size:
        return torch.arange(shape.vocab_size), "it drafts over the whole vocabulary"
    if d2t is None:
        raise ValueError(f"{directory} lacks d2t: its drafts could not be mapped to tokens")
    if len(d2t) != shape.draft_vocab_size or (t2d is not None and len(t2d) != shape.vocab_size):
        raise ValueError(
            f"{directory}: d2t and t2d must have {shape.draft_vocab_size} and {shape.vocab_size} elements, as its "
            f"{CONFIG_FILE} says"
        )
    ids = d2t.long()
    readings = {"offsets": ids + torch.arange(len(ids)), "token ids": ids}
    drafted = None if t2d is None else t2d.bool().nonzero()[:, 0]
    fitting = [name for name, tokens in readings.items() if _is_vocabulary(tokens, drafted, shape.vocab_size)]
    if not fitting:
        reason = "a vocabulary of distinct tokens" if drafted is None else "the tokens of t2d: d2t and t2d disagree"
        raise ValueError(
            f"{directory}: d2t, read as offsets or token ids, is not {reason}; it holds values from {int(ids.min())} "
            f"to {int(ids.max())}, and the ids of tokens go from 0 to {shape.vocab_size - 1}"
        )
    if len(fitting) == 2 and not torch.equal(*readings.values()):
        raise ValueError(
            f"{directory}: d2t can be read as offsets and as token ids, and there is no t2d to tell which; add t2d, "
            "bool [vocab_size], True for each token that is drafted"
        )
    return readings[fitting[0]], f"its d2t holds {fitting[0]}, of {len(ids)} tokens"


def _is_vocabulary(tokens: Tensor, drafted: Tensor | None, vocab_size: int) -> bool:
    found = tokens.sort().values
    if drafted is not None:
        return torch.equal(found, drafted)
    return bool(found[0] >= 0 and found[-1] < vocab_size and (found.diff() > 0).all())


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    pickled = directory / PICKLED_FILE
    stored: Iterable[tuple[str, Tensor]]
    if pickled.is_file() and not any((directory / name).is_file() for name in weight_files(directory)):
        stored = torch.load(pickled, map_location="cpu", weights_only=True).items()
    else:
        stored = TensorReader(directory).items()
    for stored_name, tensor in stored:
        name = stored_name.removeprefix("model.")
        for old, new in NEW_NAMES.items():
            name = name.replace(old, new)
        if not name.startswith(NOT_READ):
            yield name, tensor


def _norms_renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with the norm before the attention under specrl's name.

    If both names exist, it is unknown which tensor is used; the extra one keeps its name, so that it is refused.
    """
    names = {name: UPPER_NORM.sub(r"\1.input_layernorm.", name) for name in tensors}
    return {name if names[name] in tensors else names[name]: tensor for name, tensor in tensors.items()}


def _about_embeddings(embeddings: Tensor, policy_dir: Path) -> str:
    own = TensorReader(policy_dir).read(f"model.{EMBEDDINGS}")
    if own.shape == embeddings.shape and torch.equal(own.to(embeddings.dtype), embeddings):
        return "its embeddings are the policy's"
    return "its embeddings are not the policy's, which take their place"


def _check_tensors(tensors: dict[str, Tensor], shape: Eagle3Shape, directory: Path) -> None:
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in Eagle3(shape).state_dict().items()}
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise ValueError(f"{directory} lacks {', '.join(missing)}")
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise ValueError(f"{directory} has {', '.join(unknown)}, which a drafter with its {CONFIG_FILE} does not use")
    for name, size in wanted.items():
        if tuple(tensors[name].shape) != size:
            raise ValueError(f"{directory}: {name} is {list(tensors[name].shape)}, its {CONFIG_FILE} says {list(size)}")


def adopt_drafter(source: Path, policy_dir: Path, directory: Path) -> tuple[str, ...]:
    """Write a drafter of any layout in specrl's own; return lines for the user."""
    policy = AutoConfig.from_pretrained(policy_dir)
    stored = read_drafter(source, policy_dir, policy.dtype or torch.bfloat16)
    weights = {name: tensor.to(stored.shape.dtype) for name, tensor in stored.tensors.items()}
    if len(stored.draft_tokens) < stored.shape.vocab_size:
        weights |= vocabulary_tensors(stored.draft_tokens, stored.shape.vocab_size)
    write_drafter(directory, config_dict(stored.shape, policy, 0), weights.items())
    return stored.notes
