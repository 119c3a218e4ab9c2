"""The files of a Hugging Face directory: their names, and what can be read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrl.config.base import ConfigError, prefixed

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"  # if there is one file
INDEX_FILE = "model.safetensors.index.json"  # its `weight_map` says which of several files holds a tensor
EMBEDDINGS, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"  # outside the layers
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # all but the weights
LFS_POINTER = "version https://git-lfs"  # the beginning of a file that Git has not fetched


def weight_files(directory: Path) -> list[str]:
    """The names of the files that hold a directory's weights, whether they exist or not."""
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
    """The object in a JSON file; an error's message completes a sentence about the file's folder."""
    try:
        text = path.read_text("utf-8")
        found = json.loads(text)
    except OSError as error:
        raise ConfigError(f"has a {path.name} that cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if not isinstance(error, UnicodeDecodeError) and text.startswith(LFS_POINTER):
            raise ConfigError(f"has a Git LFS pointer in place of {path.name}: run `git lfs pull` in it") from error
        raise ConfigError(f"has a {path.name} that is not JSON in UTF-8: {error}; download it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"has a {path.name} that is no JSON object, but {type(found).__name__}")
    return found


def read_model_config(directory: Path) -> dict[str, Any]:
    """The contents of a Hugging Face directory's `config.json`."""
    if not directory.is_dir():
        wrong = "is a file: give the folder that it lies in" if directory.is_file() else "does not exist"
        raise ConfigError(f"model directory {directory} {wrong}")
    with prefixed(f"model directory {directory} "):
        return read_object(directory / CONFIG_FILE)


def chat_template(directory: Path) -> str | None:
    """The default chat template of a Hugging Face directory, found as in transformers; None without one."""
    if (file := directory / "chat_template.jinja").is_file():
        return file.read_text("utf-8", errors="replace") or None
    for name in ("chat_template.json", "tokenizer_config.json"):
        with prefixed(f"model directory {directory} "):
            found = read_object(directory / name).get("chat_template") if (directory / name).is_file() else None
        if isinstance(found, list):  # several with names
            found = next((one["template"] for one in found if one.get("name") == "default"), None)
        if isinstance(found, str):
            return found
    return None
