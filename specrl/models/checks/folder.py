"""The checks of a Hugging Face directory before a model is trained from it. Nothing here imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrl.config import ConfigError
from specrl.models.checks.config import check_config
from specrl.models.checks.headers import check_weights, remedy
from specrl.models.directory import CONFIG_FILE, LFS_POINTER, read_model_config, read_object

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""The files of which a directory must have one."""
SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that a directory may have, and that trainer or engine read then."""


def check_model_folder(directory: Path, max_length: int) -> dict[str, Any]:
    """Check all files of a Hugging Face directory, and return the contents of its `config.json`.

    Args:
        max_length: The longest prompt plus response in tokens, `model.max_length`.

    Raises:
        ConfigError: The trainer, the engine or the exporter could not use it as it is; the message is one line that
            names the directory and says what is supported, or how to mend it.
    """
    config = check_directory(directory, max_length)
    try:
        check_weights(directory, config)
        check_tokenizer(directory, config["vocab_size"])
    except OSError as error:
        raise ConfigError(f"model directory {directory} cannot be read: {error.strerror or error}") from error
    return config


def check_directory(directory: Path, max_length: int) -> dict[str, Any]:
    """Check what the `config.json` of a Hugging Face directory asks for, and return its contents.

    Args:
        max_length: The longest prompt plus response in tokens, `model.max_length`.

    Raises:
        ConfigError: Something is missing or not supported; the message is one line that names the directory.
    """
    if directory.is_dir() and not (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"model directory {directory} has no {CONFIG_FILE}: {remedy(directory, has_config=False)}")
    config = read_model_config(directory)
    try:
        check_config(config)
    except ConfigError as error:
        raise ConfigError(f"model directory {directory}: {error}") from error
    if max_length > (longest := config["max_position_embeddings"]):
        raise ConfigError(
            f"model.max_length = {max_length}: it must not exceed the {longest} positions of the model in {directory}"
        )
    return config


def check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Check that the tokenizer of a Hugging Face directory can be read, and knows no tokens beyond the embeddings.

    Raises:
        ConfigError: It is missing, damaged or too large; the message is one line that names the directory.
    """
    try:
        for name in SMALL_FILES:
            if (directory / name).is_file():
                read_object(directory / name)
        largest, token = max(_token_ids(directory), default=(-1, ""))
    except ConfigError as error:
        raise ConfigError(f"model directory {directory} {error}") from error
    if largest >= vocab_size:
        raise ConfigError(
            f"model directory {directory} has a tokenizer with token {token!r} = {largest}, beyond the embeddings' "
            f"vocab_size = {vocab_size} rows: resize these (resize_token_embeddings of transformers), or take the "
            "model's own tokenizer"
        )


def _token_ids(directory: Path) -> list[tuple[int, str]]:
    """All tokens with their ids, as far as they can be known without transformers.

    Raises:
        ConfigError: No tokenizer can be made of the files; the line begins with what is wrong.
    """
    name = next((name for name in TOKENIZER_FILES if (directory / name).is_file()), None)
    if name is None:
        raise ConfigError(f"has no tokenizer (one of {', '.join(TOKENIZER_FILES)}): copy that of its base model")
    if name == "tokenizer.model":
        if (directory / name).read_bytes()[: len(LFS_POINTER)] == LFS_POINTER.encode():
            raise ConfigError(f"has a Git LFS pointer in place of {name}: run `git lfs pull` in it")
        return []
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
