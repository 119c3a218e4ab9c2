"""Content keys: a stage's key changes when, and only when, something that its result depends on changes.

The key names the stage's folder and, through it, its Slurm job, so that a run that is started again finds what is
finished and what is still running.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specrl.artifacts import digest
from specrl.config import STAGES, Config, StageName, ValidationSetConfig, dump_config
from specrl.data.formats.places import files_of

INPUTS: dict[StageName, tuple[StageName, ...]] = {
    "prepare": (),
    "pretrain": ("prepare",),
    "calibrate": ("prepare", "pretrain"),
    "train": ("prepare", "pretrain", "calibrate"),
    "validate": ("prepare", "pretrain", "train"),
    "export": ("prepare", "train", "validate"),
}
"""The finished stages that each stage reads."""

SECTIONS: dict[StageName, tuple[str, ...]] = {
    "prepare": ("seed", "model", "data", "environment", "warm_start", "policy", "sampling"),
    "pretrain": ("seed", "model", "data", "environment", "sampling", "speculation", "engine", "drafter"),
    "calibrate": ("seed", "model", "policy", "precision"),
    "train": (
        "seed",
        "model",
        "data",
        "environment",
        "sampling",
        "speculation",
        "bubbles",
        "engine",
        "refit",
        "policy",
        "drafter",
        "train",
        "precision",
    ),
    "validate": (
        "seed",
        "model",
        "data",
        "environment",
        "sampling",
        "speculation",
        "engine",
        "train",
        "precision",
        "validate",
    ),
    "export": ("seed", "model", "data", "sampling", "speculation", "engine", "precision", "drafter"),
}
"""The sections of the configuration that each stage reads itself. What its inputs read is in their keys."""

END_BYTES = 2**20
"""How much of each end of a file is read: safetensors begin with their header, and training changes all tensors."""
UNREAD = re.compile(r"\.|README|LICENSE|NOTICE|USE_POLICY", re.IGNORECASE)
"""How the names of files in a model's folder begin that no stage reads."""
NO_STAGE_CODE = ("bench", "report", "projection", "checks")
"""Subpackages that no stage's result depends on: how results are measured or shown does not make them old."""


def stage_key(
    config: Config,
    stage: StageName,
    inputs: Mapping[StageName, str],
    code: str,
    start: Any = None,
) -> str:
    """`STAGE-` and 12 hex digits of the inputs' keys, the stage's sections, the files that these name, and the code.

    Args:
        inputs: The keys of the stages in `INPUTS[stage]`.
        code: The `code_digest` of the sources that will run.
        start: What the stage starts from besides its inputs, such as the checkpoint of another stage.
    """
    assert set(inputs) == set(INPUTS[stage]), f"{stage} reads {INPUTS[stage]}, got keys of {tuple(inputs)}"
    values = json.loads(dump_config(config))
    sections = {section: values[section] for section in SECTIONS[stage]}
    if stage == "train":
        sections["validate"] = _validation_of_training(config)
    if "train" in sections:
        sources = [import_source(algorithm.name) for _, algorithm in config.train.algorithms]
        sections["train"]["sources"] = [_content(path) for path in sources]
    if "drafter" in sections:
        sections["drafter"]["loss_source"] = _content(import_source(config.drafter.loss.name))
    if "sets" in sections.get("validate", {}):
        sections["validate"]["sets"] = [_held_out_set(name, chosen) for name, chosen in config.validate_.sets.items()]
    if "data" in sections:
        sections["data"] = _with_files(config, sections["data"])
    if "environment" in sections:
        sections["environment"]["source"] = _content(import_source(config.environment.name or ""))
    if "speculation" in sections and config.speculation.draft_model is not None:
        sections["speculation"]["draft_model"] = model_fingerprint(str(config.speculation.draft_model))
    if "drafter" in sections:  # what the source gave is in the key of `prepare`, here as below
        del sections["drafter"]["source"]
        sections["drafter"]["data"] = _content(*config.drafter.data or ())
    if stage == "prepare":
        sections["model"]["source"] = model_fingerprint(config.model.source)
        if config.adopts_drafter:
            sections["drafter"] = {"source": model_fingerprint(str(config.drafter.source))}
    elif "model" in sections:
        del sections["model"]["source"], sections["model"]["tiny"]
    return f"{stage}-{digest([stage, dict(inputs), sections, code, start])}"


def run_keys(config: Config, code: str, start: Any = None) -> dict[StageName, str]:
    """The keys of all stages; see `stage_key`. Each depends on the keys of its inputs and not on their results."""
    keys: dict[StageName, str] = {}
    for stage in STAGES:
        inputs = {name: keys[name] for name in INPUTS[stage]}
        keys[stage] = stage_key(config, stage, inputs, code, start if stage in ("prepare", "train") else None)
    return keys


def named_files(config: Config) -> dict[str, str]:
    """A digest of each of the user's files that the configuration names, by the key that names it.

    They are data, sources of functions, and models in folders. Stages read them where they lie.
    """
    sources = {registry.key: import_source(algorithm.name) for registry, algorithm in config.algorithms}
    sources["data.reward"] = import_source(config.data.reward)
    sources["environment.name"] = import_source(config.environment.name or "")
    for name, chosen in config.validate_.sets.items():
        sources[f"validate.sets.{name}.reward"] = import_source(chosen.reward or "")
    paths = {**data_places(config), **{key: (path,) for key, path in sources.items()}}
    digests = {key: content for key, places in paths.items() if (content := _content(*places)) is not None}
    models = {
        "model.source": config.model.source,
        "speculation.draft_model": config.speculation.draft_model,
        "drafter.source": config.drafter.source,
    }
    folders = {key: model_fingerprint(str(source)) for key, source in models.items() if source is not None}
    return digests | {key: digest(found) for key, found in folders.items() if isinstance(found, list)}


def data_places(config: Config) -> dict[str, tuple[Path, ...]]:
    """The places of data that the configuration names, by their keys."""
    places = {
        "data.path": config.data.path,
        "data.validation_path": config.data.validation_path,
        "drafter.data": config.drafter.data,
        **{f"validate.sets.{name}.path": chosen.path for name, chosen in config.validate_.sets.items()},
    }
    return {key: named for key, named in places.items() if named is not None}


def code_digest(package: Path) -> str:
    """A digest of the relative paths and contents of those Python sources of `specrl` that stages import."""
    sources = ((path, path.relative_to(package)) for path in package.rglob("*.py"))
    return files_digest((path, str(name)) for path, name in sources if name.parts[0] not in NO_STAGE_CODE)


def files_digest(files: Iterable[tuple[Path, str]]) -> str:
    """The first 12 hex digits of the SHA-256 over the (path, name) pairs' names and contents, in any order."""
    return contents_digest({name: file_digest(path) for path, name in files})


def contents_digest(contents: Mapping[str, str]) -> str:
    """What `files_digest` does, given the digest of each file by its name."""
    total = hashlib.sha256()
    for name, content in sorted(contents.items()):
        total.update(f"{name}\0{content}\n".encode())
    return total.hexdigest()[:12]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's contents in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def import_source(name: str) -> Path | None:
    """The source file of a function that is given as `package.module:function`, or None.

    It is looked for in the current folder and then on `sys.path`, and not imported.
    """
    module, separator, _ = name.partition(":")
    if not separator:
        return None
    package, *rest = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path])
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    places = spec.submodule_search_locations or []
    found = (Path(place, *rest).with_suffix(".py") for place in places)
    return next((path for path in found if path.is_file()), None)


def _with_files(config: Config, data: dict[str, Any]) -> dict[str, Any]:
    named = {"path": config.data.path, "validation_path": config.data.validation_path}
    contents = {key: _content(*places or ()) for key, places in named.items()}
    return {**data, **contents, "reward_source": _content(import_source(config.data.reward))}


def _validation_of_training(config: Config) -> dict[str, Any]:
    if not config.validate_.every:
        return {}
    kept = {"every", "sets", "correct_reward", "num_prompts"}
    return config.validate_.model_dump(mode="json", include=kept)


def _held_out_set(name: str, chosen: ValidationSetConfig) -> list[Any]:
    reward_source = _content(import_source(chosen.reward or ""))
    return [
        name,
        {**chosen.model_dump(mode="json"), "path": _content(*chosen.path or ()), "reward_source": reward_source},
    ]


def _content(*places: Path | None) -> str | None:
    files = files_of([place for place in places if place is not None])
    return files_digest((path, str(number or "")) for number, path in enumerate(files)) if files else None


def model_fingerprint(source: str) -> Any:
    """The names, sizes and ends of the files in a model's folder, whose weights are too large to hash.

    When they were written does not count, as a copy has another time, and neither do files that nothing reads. A source
    that is not a folder stands for itself.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return source
    entries = [entry for entry in os.scandir(folder) if entry.is_file() and not UNREAD.match(entry.name)]
    return sorted((entry.name, entry.stat().st_size, _ends(Path(entry.path))) for entry in entries)


def _ends(path: Path) -> str:
    with path.open("rb") as file:
        found = hashlib.sha256(file.read(END_BYTES))
        file.seek(max(0, path.stat().st_size - END_BYTES))
        found.update(file.read(END_BYTES))
    return found.hexdigest()[:12]
