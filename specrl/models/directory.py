"""The files of a Hugging Face directory besides the weights, and their checks. Nothing here imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrl.config import ConfigError
from specrl.models.support import check_config

CONFIG_FILE = "config.json"
"""The model's configuration, as transformers writes it."""
WEIGHTS_FILE = "model.safetensors"
"""The weights, where they are in one file."""
INDEX_FILE = "model.safetensors.index.json"
"""The index, where the weights are in several files: its `weight_map` says which file holds each tensor."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""The files of which a directory must have one."""
SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that a directory may have, and that trainer or engine read then."""
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""The endings of the files that belong to a model besides its weights, such as the tokenizer's."""
LFS_POINTER = "version https://git-lfs"
"""What stands in place of a large file where Git has not fetched it."""


def weight_files(directory: Path) -> list[str]:
    """Return the names of the files that hold the weights of a Hugging Face directory, whether they exist or not.

    Raises:
        ConfigError: There is an index that is none.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        return [WEIGHTS_FILE]
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or any(Path(str(name)).name != name for name in listed.values()):
        raise ConfigError(
            f"has a {INDEX_FILE} without weight_map of files beside it: remove it if {WEIGHTS_FILE} is the whole model"
        )
    return sorted(set(listed.values()))


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: It is none, or cannot be read; the line begins with what is wrong with the file's folder.
    """
    try:
        text = path.read_text("utf-8")
        found = json.loads(text)
    except OSError as error:
        raise ConfigError(f"has a {path.name} that cannot be read: {error.strerror}") from error
    except ValueError as error:
        if not isinstance(error, UnicodeDecodeError) and text.startswith(LFS_POINTER):
            raise ConfigError(f"has a Git LFS pointer in place of {path.name}: run `git lfs pull` in it") from error
        raise ConfigError(f"has a {path.name} that is not JSON in UTF-8: {error}; download it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"has a {path.name} that is no JSON object, but {type(found).__name__}")
    return found


def read_model_config(directory: Path) -> dict[str, Any]:
    """Return the contents of a Hugging Face directory's `config.json`.

    Raises:
        ConfigError: The directory or the file does not exist, or the file is no JSON object.
    """
    if not directory.is_dir():
        raise ConfigError(f"model directory {directory} does not exist")
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"model directory {directory} has no {CONFIG_FILE}")
    try:
        return read_object(directory / CONFIG_FILE)
    except ConfigError as error:
        raise ConfigError(f"model directory {directory} {error}") from error


def check_directory(directory: Path, max_length: int) -> dict[str, Any]:
    """Check what the `config.json` of a Hugging Face directory asks for, and return its contents.

    Args:
        max_length: The longest prompt plus response in tokens, `model.max_length`.

    Raises:
        ConfigError: Something is missing or not supported; the message is one line that names the directory.
    """
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
    """Return all tokens with their ids, as far as they can be known without transformers.

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


def has_chat_template(directory: Path) -> bool:
    """Return whether a Hugging Face directory has a chat template, in any of the places where transformers looks."""
    names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    settings = directory / "tokenizer_config.json"
    return any((directory / name).exists() for name in names) or (
        settings.is_file() and bool(read_object(settings).get("chat_template"))
    )
