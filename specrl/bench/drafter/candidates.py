"""What `specrl bench drafter` measures on a file of prompts: the kind of a drafter, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specrl.config import ConfigError
from specrl.models.directory import read_model_config
from specrl.models.drafters import LOSS_KEY, SPECULATORS_KINDS
from specrl.models.families import FAMILIES, num_mtp_layers
from specrl.training.drafter.io import adopt_drafter


@dataclass(frozen=True)
class Candidate:
    """A drafter that is measured, n-gram lookup, or plain decoding."""

    name: str
    """The folder as it was given, or `ngram` or `plain`."""
    kind: str
    """The draft method by which the engine uses it; `plain` for no drafts."""
    layers: int
    """The number of the drafter's transformer layers; 0 without a model."""
    loss: str | None = None
    """The loss that it was trained with, if its folder says so."""
    folder: Path | None = None
    """The drafter's folder; None without a model."""
    notes: tuple[str, ...] = ()
    """What was found in it, as lines for the page."""


NGRAM_LOOKUP = Candidate("ngram", "ngram", 0)
NO_DRAFTS = Candidate("plain", "plain", 0)


def read_candidate(folder: Path, policy_dir: Path) -> Candidate:
    """Return what the folder of a drafter holds.

    EAGLE-3 drafters may have the layout of the published checkpoints or that of the `speculators` library. Another
    folder of the policy's own architecture drafts with its multi-token-prediction layer, and any other model that
    specrl knows is a draft model with the policy's vocabulary.

    Raises:
        ConfigError: The folder or its `config.json` is missing, or no draft method fits it.
    """
    config = read_model_config(folder)
    kind = _kind(folder, config, policy_dir)
    layers = config.get("transformer_layer_config", config).get("num_hidden_layers", 1)
    if kind == "mtp":
        layers = num_mtp_layers(config)
    return Candidate(str(folder), kind, int(layers), _loss(config), folder)


def adopted(candidate: Candidate, policy_dir: Path, directory: Path) -> Candidate:
    """Return an EAGLE-3 drafter in a folder that the engine loads, with what was found in its own.

    The layouts and habits of others are translated (see `specrl.training.drafter.io`). What specrl cannot compute, vLLM
    may: then the drafter's own folder is left as it is.

    Args:
        directory: The new folder.
    """
    if candidate.kind != "eagle3" or candidate.folder is None:
        return candidate
    try:
        return replace(
            candidate, folder=directory, notes=adopt_drafter(candidate.folder, policy_dir.absolute(), directory)
        )
    except ValueError as error:
        return replace(candidate, notes=(f"it is loaded by vLLM as it is: {error}",))


def _kind(folder: Path, config: dict[str, Any], policy_dir: Path) -> str:
    trained_with = config.get("speculators_model_type")
    architectures = [str(name) for name in config.get("architectures") or []]
    if trained_with in SPECULATORS_KINDS:
        return "eagle3"
    if not trained_with and ("draft_vocab_size" in config or any("eagle3" in name.lower() for name in architectures)):
        return "eagle3"
    if not trained_with and any(family.architecture in architectures for family in FAMILIES.values()):
        is_policy = architectures == read_model_config(policy_dir).get("architectures")
        return "mtp" if is_policy and num_mtp_layers(config) else "draft_model"
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise ConfigError(
        f"--drafter {folder}: {trained_with or ' '.join(architectures) or 'no architecture'} in its config.json is not "
        f"a drafter that can be measured; allowed: EAGLE-3 (as published or in speculators format), and {known}"
    )


def _loss(config: dict[str, Any]) -> str | None:
    loss = config.get(LOSS_KEY)
    return None if loss is None else str(loss)
