"""What `specrl bench drafter` measures on a file of prompts; the kind of a drafter is read from its folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specrl.config import ConfigError
from specrl.models.directory import read_model_config
from specrl.models.drafters import LOSS_KEY, SPECULATORS_KIND
from specrl.models.families import FAMILIES, num_mtp_layers
from specrl.training.drafter.io import adopt_drafter


@dataclass(frozen=True)
class Candidate:
    """What is measured: a drafter, n-gram lookup, or plain decoding."""

    name: str
    kind: str  # the draft method, or `plain`
    layers: int = 0
    loss: str | None = None  # the training loss, if the folder states it
    folder: Path | None = None
    notes: tuple[str, ...] = ()  # findings about the folder, as lines for the page

    @property
    def facts(self) -> dict[str, Any]:
        """The columns that describe the candidate."""
        return {name: getattr(self, name) for name in ("kind", "layers", "loss", "notes")} | {"drafter": self.name}


NGRAM_LOOKUP, NO_DRAFTS = Candidate("ngram", "ngram"), Candidate("plain", "plain")


def read_candidate(folder: Path, policy_dir: Path) -> Candidate:
    """Determine from a folder what kind of drafter it holds.

    EAGLE-3 drafters are read as published or in the `speculators` format. A model of the policy's own architecture
    drafts with its multi-token-prediction layer; any other known model serves as a draft model, if its vocabulary is
    the policy's.
    """
    config = read_model_config(folder)
    trained_with = config.get("speculators_model_type")
    names = [str(name) for name in config.get("architectures") or []]
    layers = config.get("transformer_layer_config", config).get("num_hidden_layers", 1)
    known = [family.architecture for family in FAMILIES.values()]
    is_eagle = "draft_vocab_size" in config or any("eagle3" in name.lower() for name in names)
    if trained_with == SPECULATORS_KIND or (not trained_with and is_eagle):
        kind = "eagle3"
    elif not trained_with and set(names) & set(known):
        is_policy = names == read_model_config(policy_dir).get("architectures") and num_mtp_layers(config)
        kind, layers = ("mtp", num_mtp_layers(config)) if is_policy else ("draft_model", layers)
    else:
        raise ConfigError(
            f"--drafter {folder}: {trained_with or ' '.join(names) or 'no architecture'} in its config.json is not a "
            f"drafter to measure; allowed: EAGLE-3 (as published or in speculators format), {', '.join(known)}"
        )
    return Candidate(str(folder), kind, int(layers), config.get(LOSS_KEY), folder)


def adopted(candidate: Candidate, policy_dir: Path, directory: Path) -> Candidate:
    """Convert an EAGLE-3 drafter of another layout into a new folder; vLLM may support what specrl does not."""
    if candidate.kind != "eagle3" or candidate.folder is None:
        return candidate
    try:
        notes = adopt_drafter(candidate.folder, policy_dir.absolute(), directory)
        return replace(candidate, folder=directory, notes=notes)
    except ValueError as error:
        return replace(candidate, notes=(f"it is loaded by vLLM as it is: {error}",))
