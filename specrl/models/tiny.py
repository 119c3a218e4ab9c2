"""A tiny random model with a character tokenizer, with which the whole pipeline runs without any download."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from specrl.config import ModelConfig
from specrl.models.directory import HEAD, WEIGHTS_FILE
from specrl.models.families import tiny_config, tiny_family
from specrl.models.hf_io import write_tensors
from specrl.models.mtp_modules import MTP_LAYERS

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation
BYTE_LEVEL = {"\n": "Ċ", " ": "Ġ"}  # how byte-level tokenizers spell these characters
INITIAL_STD = 0.05


def write_tiny_model(config: ModelConfig, seed: int, directory: Path) -> None:
    """Write the model of `model.tiny`, with random weights from the seed, and its tokenizer."""
    tiny, tokenizer = config.tiny, character_tokenizer(config.max_length)
    family = tiny_family(tiny)
    config_class = CONFIG_MAPPING[family.model_type]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    hf_config = config_class(
        **tiny_config(config),
        dtype=config.dtype,
        initializer_range=INITIAL_STD,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(hf_config)
        weights = revert_weight_conversion(model, model.state_dict())  # each expert's matrices separately
        if family.mtp is not None:
            for layer in range(tiny.mtp_layers):
                found = _mtp_layer(model_class, hf_config, has_final_norm=family.mtp.final_norm is not None)
                weights |= {family.mtp.name_on_disk(name, layer): weight for name, weight in found.items()}
            hf_config.update({MTP_LAYERS: tiny.mtp_layers})
    if hf_config.tie_word_embeddings:
        del weights[HEAD]
    dtype = getattr(torch, config.dtype)
    write_tensors(directory / WEIGHTS_FILE, {name: weight.to(dtype) for name, weight in weights.items()})
    hf_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _mtp_layer(model_class: Any, hf_config: Any, *, has_final_norm: bool) -> dict[str, Tensor]:
    lists = {key: value[:1] for key, value in hf_config.to_dict().items() if key.endswith("layer_types") and value}
    one_layer = model_class(type(hf_config)(**{**hf_config.to_dict(), "num_hidden_layers": 1, **lists}))
    size = hf_config.hidden_size
    weights = dict(one_layer.model.layers[0].state_dict())
    weights["input_proj.weight"] = torch.randn(size, 2 * size) * INITIAL_STD
    norms = ("token", "hidden", "final") if has_final_norm else ("token", "hidden")
    return weights | {f"{name}_layernorm.weight": torch.ones(size) for name in norms}


def character_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per printable ASCII character and newline; anything else is `<unk>`.

    It is a byte-level BPE without merges, because that is what transformers makes of the tokenizer in a Qwen2
    directory.
    """
    names = SPECIAL + [BYTE_LEVEL.get(character, character) for character in CHARACTERS]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
