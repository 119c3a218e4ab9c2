"""The draft sources, one line per `speculation.method`: what vLLM is told, and what the source takes.

Nobody else asks for a method by its name: a new one is an entry in `SOURCES` and a name in `SpeculationConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.config import Config

NGRAM_LOOKUP = (2, 4)
"""Shortest and longest n-gram looked up in the sequence so far."""
NO_DRAFTER = "specrl.rollout.vllm.drafting.NoDrafter"


@dataclass(frozen=True)
class DraftSource:
    """How drafts are made. Stored text, where there is any, takes precedence over a drafter's own proposals."""

    arguments: Callable[[Config, Path | None], dict[str, Any]]
    """(config, drafter directory) -> the source's part of vLLM's `speculative_config`.

    Raises ValueError without a drafter directory where one is needed.
    """
    drafts: bool = True
    """Has proposals of its own, of up to `speculation.k` tokens."""
    replays: bool = False
    """Proposes stored text, of up to `speculation.replay_k` tokens."""
    has_weights: bool = False
    """Has a drafter that is pretrained, trained along with the policy, refitted, and exported."""
    is_policy_layer: bool = False
    """That drafter is a layer of the policy's own checkpoint, and has the policy's head and vocabulary."""
    reads_every_token: bool = False
    """Runs a model of its own, which must see every token lest its KV cache has holes: it is asked for 0 drafts too."""


def draft_source(config: Config) -> DraftSource | None:
    """The source that `speculation.method` names; none for plain decoding."""
    return SOURCES.get(config.speculation.method)


def trains_drafter(config: Config) -> bool:
    """Whether the run has a drafter of its own: pretrained, co-trained, exported."""
    source = draft_source(config)
    return source is not None and source.has_weights


def drafts_with_policy_layer(config: Config) -> bool:
    """Whether the drafter is the policy's own multi-token-prediction layer."""
    source = draft_source(config)
    return source is not None and source.is_policy_layer


def draft_lengths(config: Config) -> tuple[int, int]:
    """Longest draft of the drafter and longest draft from stored text, tokens; 0 for what the method does not have."""
    source, speculation = draft_source(config), config.speculation
    if source is None:
        return 0, 0
    return speculation.k if source.drafts else 0, speculation.replay_k if source.replays else 0


def _eagle3(config: Config, drafter_dir: Path | None) -> dict[str, Any]:
    if drafter_dir is None:
        method = config.speculation.method
        raise ValueError(f'speculation.method = "{method}" needs a drafter directory; pass one or speculate=False')
    return {
        "method": "eagle3",
        "model": str(drafter_dir),
        "draft_tensor_parallel_size": config.engine.tensor_parallel,
    }


def _mtp(config: Config, drafter_dir: Path | None) -> dict[str, Any]:
    # The directory is the policy's. vLLM takes that by default, but then expects the layer in the policy's precision.
    return {
        "method": "mtp",
        "model": str(drafter_dir),
        "draft_tensor_parallel_size": config.engine.tensor_parallel,
    }


def _ngram(config: Config, drafter_dir: Path | None) -> dict[str, Any]:
    shortest, longest = NGRAM_LOOKUP
    return {"method": "ngram", "prompt_lookup_min": shortest, "prompt_lookup_max": longest}


def _draft_model(config: Config, drafter_dir: Path | None) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": str(config.speculation.draft_model),
        "draft_tensor_parallel_size": config.engine.tensor_parallel,
    }


def _replay(config: Config, drafter_dir: Path | None) -> dict[str, Any]:
    return {"method": "custom_class", "model": NO_DRAFTER}


SOURCES: dict[str, DraftSource] = {
    "eagle3": DraftSource(_eagle3, has_weights=True, reads_every_token=True),
    "mtp": DraftSource(_mtp, has_weights=True, is_policy_layer=True, reads_every_token=True),
    "ngram": DraftSource(_ngram),
    "draft_model": DraftSource(_draft_model, reads_every_token=True),
    "replay": DraftSource(_replay, drafts=False, replays=True),
    "eagle3+replay": DraftSource(_eagle3, replays=True, has_weights=True, reads_every_token=True),
}
"""Every `speculation.method` but "none"."""
