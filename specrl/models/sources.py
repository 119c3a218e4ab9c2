"""Where the policy comes from: a Hugging Face directory with config, tokenizer and safetensors, whatever the source."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from specrl.artifacts import write_json
from specrl.config import Config, ConfigError, ModelConfig
from specrl.models import mtp

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", mtp.ARCHITECTURE)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


def materialise_model(config: ModelConfig, seed: int, directory: Path) -> Path:
    """Make `directory` the Hugging Face directory of `model.source`; a complete one is left as it is.

    Small files are copied, weights of an existing directory linked. Written under a temporary name and renamed.

    Raises:
        ConfigError: no such source, or a directory that is not a model this project can train; one line.
    """
    if directory.is_dir():
        check_directory(directory, config.max_length)
        return directory
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        _write(config, seed, temporary)
        temporary.replace(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def check_source(config: ModelConfig) -> None:
    """What can be said about `model.source` without downloading or writing anything.

    Raises:
        ConfigError: no such source, or a directory that is not a model this project can train.
    """
    kind = _kind(config.source)
    if kind == "directory":
        check_directory(Path(config.source).expanduser(), config.max_length)
    elif kind == "smollm2-135m":
        from specrl.models.gguf import find_packaged

        find_packaged()


def check_directory(directory: Path, max_length: int) -> dict[str, Any]:
    """Validate a Hugging Face directory and return its config.

    Raises:
        ConfigError: one line naming the directory and what is missing or not supported.
    """
    if not directory.is_dir():
        raise ConfigError(f"model directory {directory} does not exist")
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"model directory {directory} has no config.json") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"model directory {directory}: config.json is not JSON: {error}") from error
    names = config.get("architectures") or ["none"]
    if names[0] not in ARCHITECTURES:
        raise ConfigError(f"model directory {directory} is a {names[0]}; supported: {', '.join(ARCHITECTURES)}")
    if mtp.has_mtp(config):
        mtp.check_mtp(config, directory)
    for name in _weight_files(directory):
        if not (directory / name).is_file():
            raise ConfigError(f"model directory {directory} lacks {name}")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model directory {directory} has no tokenizer (one of {', '.join(TOKENIZER_FILES)})")
    longest = config.get("max_position_embeddings", max_length)
    if max_length > longest:
        raise ConfigError(f"model.max_length = {max_length}: the model in {directory} has {longest} positions")
    return config


def check_method(config: Config, directory: Path | None = None) -> None:
    """Whether the model can be drafted for by `speculation.method`, as far as it is known.

    Args:
        directory: the model, where it has been materialised.

    Raises:
        ConfigError: `mtp` for a model without a multi-token-prediction layer.
    """
    if not config.speculation.draft_method.is_policy_layer:
        return
    model = config.model
    if directory is None and _kind(model.source) == "directory":
        directory = Path(model.source).expanduser()
    if directory is not None:
        found = mtp.has_mtp(check_directory(directory, model.max_length))
    else:
        found = model.tiny.family == "mimo" if model.source == "tiny" else _kind(model.source) == "hub"
    if not found:
        raise ConfigError(
            f'speculation.method = "mtp": model.source = {model.source!r} has no multi-token-prediction layer; '
            f"supported: directories with architecture {mtp.ARCHITECTURE}, and tiny with model.tiny.family = mimo; "
            'other models take "eagle3"'
        )


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a Hugging Face directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _kind(source: str) -> str:
    if source in ("smollm2-135m", "tiny"):
        return source
    path = Path(source).expanduser()
    if path.is_dir() or path.is_absolute() or source.startswith("."):
        return "directory"
    if HUB_ID.fullmatch(source):
        return "hub"
    raise ConfigError(
        f"model.source = {source!r}: allowed are smollm2-135m, tiny, an existing directory, or a hub id owner/name"
    )


def _write(config: ModelConfig, seed: int, directory: Path) -> None:
    kind = _kind(config.source)
    # Imported here: these need torch, and the validation above must not.
    if kind == "smollm2-135m":
        from specrl.models.gguf import find_packaged, write_gguf_model

        write_gguf_model(find_packaged(), config.dtype, directory)
    elif kind == "tiny":
        from specrl.models.tiny import write_tiny_model

        write_tiny_model(config, seed, directory)
    else:
        source = Path(config.source).expanduser() if kind == "directory" else _download(config.source)
        check_directory(source, config.max_length)
        _link(source, directory)


def _weight_files(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return ["model.safetensors"]


def _link(source: Path, directory: Path) -> None:
    """Copy what is small, link the weights: a 16 GB model must not be written twice."""
    weights = set(_weight_files(source))
    for file in source.iterdir():
        if file.name in weights:
            (directory / file.name).symlink_to(file.resolve())
        elif file.suffix in (".json", ".jinja", ".txt", ".model") and file.is_file():
            shutil.copyfile(file, directory / file.name)
    config = json.loads((source / "config.json").read_text())
    if mtp.has_mtp(config):
        write_json(directory / "config.json", mtp.as_qwen2(config))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_PATTERNS))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model.source = {hub_id!r}: not in the local cache, and the hub cannot be reached; "
            "download it elsewhere and give its directory"
        ) from error
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.source = {hub_id!r} cannot be downloaded: {reason}") from error
