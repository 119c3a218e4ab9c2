"""The checks of a Hugging Face directory before a model is trained from it. Nothing here imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrl.config.base import ConfigError, prefixed
from specrl.models.checks.config import EOS, check_config, form_problems, token_problems
from specrl.models.checks.headers import check_weights, remedy
from specrl.models.directory import CONFIG_FILE, LFS_POINTER, read_model_config, read_object

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is needed
SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that a directory may have, and that trainer or engine then read."""


def check_model_folder(directory: Path, max_length: int) -> dict[str, Any]:
    """Check all files of a Hugging Face directory, and return the contents of its `config.json`."""
    config = check_directory(directory, max_length)
    try:
        check_weights(directory, config)
        with prefixed(f"model directory {directory} "):
            _check_tokenizer(directory, config)
    except OSError as error:
        raise ConfigError(f"model directory {directory} cannot be read: {error.strerror or error}") from error
    return config


def check_directory(directory: Path, max_length: int) -> dict[str, Any]:
    """Check what the `config.json` of a Hugging Face directory asks for, and return its contents."""
    if directory.is_dir() and not (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"model directory {directory} has no {CONFIG_FILE}: {remedy(directory, has_config=False)}")
    config = read_model_config(directory)
    with prefixed(f"model directory {directory}: "):
        check_config(config)
    if max_length > (longest := config["max_position_embeddings"]):
        raise ConfigError(
            f"model.max_length = {max_length}: it must not exceed the {longest} positions of the model in {directory}"
        )
    return config


def _check_tokenizer(directory: Path, config: Mapping[str, Any]) -> None:
    small = {name: read_object(directory / name) for name in SMALL_FILES if (directory / name).is_file()}
    settings = small.get("special_tokens_map.json", {}) | small.get("tokenizer_config.json", {})
    generation = small.get("generation_config.json", {})
    for problem, name in ((problem, name) for name, found in small.items() for problem in form_problems(found)):
        raise ConfigError(f"has a {name} with {problem}")
    for problem in token_problems(generation, config["vocab_size"]):
        raise ConfigError(f"has a generation_config.json with {problem}")
    tokens = token_ids(directory)
    if "auto_map" in settings:
        _load_without_its_code(directory)
    largest, token = max(tokens, default=(-1, ""))
    known = {token for _, token in tokens}
    if known and (added := sorted(_special_tokens(settings) - known)):
        largest, token = largest + len(added), added[-1]  # transformers numbers them after the others
    if largest >= (vocab_size := config["vocab_size"]):
        raise ConfigError(
            f"has a tokenizer with token {token!r} = {largest}, beyond the embeddings' vocab_size = {vocab_size} rows: "
            "resize these (resize_token_embeddings of transformers), or take the model's own tokenizer"
        )
    if all(end in (None, [], "") for end in (config.get(EOS), generation.get(EOS), settings.get("eos_token"))):
        where = f"{EOS} in {CONFIG_FILE} and eos_token in tokenizer_config.json"
        raise ConfigError(f"names no token that ends a response: set {where}")


def _load_without_its_code(directory: Path) -> None:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, AttributeError, LookupError, TypeError) as error:  # also if auto_map is no object
        raise ConfigError(
            "has a tokenizer with code of its own, which is not executed: remove auto_map from tokenizer_config.json "
            "if tokenizer.json is all of it, or take another tokenizer"
        ) from error


def _special_tokens(settings: Mapping[str, Any]) -> set[str]:
    lists = ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder")
    found = [value for key, value in settings.items() if key.endswith("_token") or key in lists]
    texts = set[str]()
    while found:
        value = found.pop()
        if isinstance(value, str):
            texts.add(value)
        elif isinstance(value, list):
            found += value
        elif isinstance(value, dict):
            found += [value["content"]] if "content" in value else value.values()
    return texts


def end_tokens(directory: Path) -> set[int]:
    """The tokens that end a response according to a directory's `config.json` or else `generation_config.json`."""
    path, found = directory / "generation_config.json", read_model_config(directory).get(EOS)
    if found is None and path.is_file():
        found = read_object(path).get(EOS)
    return set(found if isinstance(found, list) else [found]) - {None}


def token_ids(directory: Path) -> list[tuple[int, str]]:
    """The tokens of a directory's tokenizer with their ids; empty for a tokenizer in tiktoken's format."""
    name = next((name for name in TOKENIZER_FILES if (directory / name).is_file()), None)
    if name is None:
        raise ConfigError(f"has no tokenizer (one of {', '.join(TOKENIZER_FILES)}): copy that of its base model")
    if name == "tokenizer.model":
        return _sentencepiece_ids((directory / name).read_bytes())
    found = read_object(directory / name)
    if name == "vocab.json":
        if not (directory / "merges.txt").is_file():
            raise ConfigError("has vocab.json without merges.txt: copy the tokenizer's files of its base model")
        added = directory / "added_tokens.json"
        return [(index, token) for token, index in (found | (read_object(added) if added.is_file() else {})).items()]
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_str(json.dumps(found)).get_vocab()
    except Exception as error:  # the library raises nothing more precise
        reason = " ".join(str(error).split())
        raise ConfigError(f"has a {name} that is no tokenizer: {reason}; download it again") from error
    return [(index, token) for token, index in vocabulary.items()]


def _sentencepiece_ids(model: bytes) -> list[tuple[int, str]]:
    if model.startswith(LFS_POINTER.encode()):
        raise ConfigError("has a Git LFS pointer in place of tokenizer.model: run `git lfs pull` in it")
    if re.match(rb"[A-Za-z0-9+/=]+ \d+\n", model):  # tiktoken's format
        return []
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor()
    try:
        pieces.LoadFromSerializedProto(model or b"none")
    except RuntimeError as error:
        raise ConfigError("has a tokenizer.model that is no tokenizer: download it again") from error
    return [(index, pieces.IdToPiece(index)) for index in range(pieces.GetPieceSize())]
