"""A tiny random model with a character tokenizer, made on the spot: the whole pipeline without any download."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specrl.config import ModelConfig
from specrl.models import mtp

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation
BYTE_LEVEL = {"\n": "Ċ", " ": "Ġ"}
"""How byte-level tokenizers spell the two characters that are not their own name."""
VOCAB_SIZE = 128
"""Characters and special tokens, padded so that tensor parallelism divides the vocabulary."""
INITIAL_STD = 0.05
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mimo": (Qwen2Config, Qwen2ForCausalLM),
}


def write_tiny_model(config: ModelConfig, seed: int, directory: Path) -> None:
    """Write a random model of `model.tiny`'s shape and its tokenizer; the same seed gives the same weights."""
    tiny = config.tiny
    tokenizer = character_tokenizer(config.max_length)
    config_class, model_class = FAMILIES[tiny.family]
    extra: dict[str, Any] = {"head_dim": tiny.hidden_size // tiny.num_heads} if tiny.family == "qwen3" else {}
    hf_config = config_class(
        architectures=[model_class.__name__],
        dtype=config.dtype,
        vocab_size=VOCAB_SIZE,
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_kv_heads,
        tie_word_embeddings=tiny.tied,
        max_position_embeddings=config.max_length,
        initializer_range=INITIAL_STD,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = model_class(hf_config).state_dict()
        if tiny.family == "mimo":
            weights |= mtp_weights(hf_config)
            hf_config.update({"architectures": [mtp.ARCHITECTURE], "num_nextn_predict_layers": 1})
    if tiny.tied:
        del weights["lm_head.weight"]
    weights = {name: weight.to(getattr(torch, config.dtype)) for name, weight in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    hf_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def mtp_weights(hf_config: Qwen2Config) -> dict[str, torch.Tensor]:
    """A random multi-token-prediction layer by its names on disk: a decoder layer, a projection before it, norms."""
    one_layer = Qwen2ForCausalLM(Qwen2Config(**{**hf_config.to_dict(), "num_hidden_layers": 1, "layer_types": None}))
    size = hf_config.hidden_size
    weights = dict(one_layer.model.layers[0].state_dict())
    weights["input_proj.weight"] = torch.randn(size, 2 * size) * INITIAL_STD
    weights |= {f"{name}_layernorm.weight": torch.ones(size) for name in ("token", "hidden", "final")}
    return {mtp.PREFIX + name: weight for name, weight in weights.items()}


def character_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline; anything else is `<unk>`. No token is added to a text.

    It is a byte-level BPE without merges, because transformers rebuilds the tokenizer of a Qwen2 directory as one.
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
