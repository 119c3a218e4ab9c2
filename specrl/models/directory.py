"""The checks of a Hugging Face directory before a model is trained from it. Nothing here imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrl.config import ConfigError
from specrl.models.families import Family, expert_shape, family_of

CONFIG_FILE = "config.json"
"""The model's configuration, as transformers writes it."""
WEIGHTS_FILE = "model.safetensors"
"""The weights, where they are in one file."""
INDEX_FILE = "model.safetensors.index.json"
"""The index, where the weights are in several files: its `weight_map` says which file holds each tensor."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""The files of which a directory must have one."""
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""The endings of the files that belong to a model besides its weights, such as the tokenizer's."""


def weight_files(directory: Path) -> list[str]:
    """Return the names of the files that hold the weights of a Hugging Face directory, whether they exist or not."""
    index = directory / INDEX_FILE
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return [WEIGHTS_FILE]


def read_model_config(directory: Path) -> dict[str, Any]:
    """Return the contents of a Hugging Face directory's `config.json`.

    Raises:
        ConfigError: The directory or the file does not exist, or the file is not JSON.
    """
    if not directory.is_dir():
        raise ConfigError(f"model directory {directory} does not exist")
    try:
        config: dict[str, Any] = json.loads((directory / CONFIG_FILE).read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"model directory {directory} has no {CONFIG_FILE}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"model directory {directory}: {CONFIG_FILE} is not JSON: {error}") from error
    return config


def check_directory(directory: Path, max_length: int) -> dict[str, Any]:
    """Check a Hugging Face directory and return the contents of its `config.json`.

    Args:
        max_length: The longest prompt plus response in tokens, `model.max_length`.

    Raises:
        ConfigError: Something is missing or not supported; the message is one line that names the directory.
    """
    config = read_model_config(directory)
    try:
        family = family_of(config)
        expert_shape(config)  # refuses layers without experts among those with
    except ConfigError as error:
        raise ConfigError(f"model directory {directory}: {error}") from error
    _check_family(config, family, directory)
    for name in weight_files(directory):
        if not (directory / name).is_file():
            raise ConfigError(f"model directory {directory} lacks {name}")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model directory {directory} has no tokenizer (one of {', '.join(TOKENIZER_FILES)})")
    longest = config.get("max_position_embeddings", max_length)
    if max_length > longest:
        raise ConfigError(
            f"model.max_length = {max_length}: it must not exceed the {longest} positions of the model in {directory}"
        )
    return config


def _check_family(config: dict[str, Any], family: Family, directory: Path) -> None:
    """Raise ConfigError for a model of the family that specrl or vLLM would compute wrongly."""
    if config.get("tie_word_embeddings", False) and not family.can_tie:
        raise ConfigError(
            f"{directory}: {family.architecture} with tie_word_embeddings = true is not supported: "
            "vLLM needs the output layer of this architecture in the checkpoint"
        )
    layers = config.get("num_hidden_layers", 0)
    if (key := family.experts_from) is not None and (start := config.get(key, 0)) < layers:
        raise ConfigError(
            f"{directory}: {family.architecture} with {key} = {start} is not supported: no layer may have experts, so "
            f"it must be at least num_hidden_layers = {layers}"
        )
    for key, entry in family.every_layer:
        found = config.get(key) or ["none given"]
        if other := [value for value in found if value != entry]:
            raise ConfigError(
                f'{directory}: {family.architecture} with {key} = "{other[0]}" in {len(other)} of {len(found)} layers '
                f'is not supported: it must be "{entry}" in all of them'
            )
    if family.mtp is not None and (config.get("rope_scaling") or {}).get("rope_type", "default") != "default":
        raise ConfigError(
            f"{directory}: {family.architecture} with scaled rotary embeddings is not supported: remove rope_scaling"
        )
