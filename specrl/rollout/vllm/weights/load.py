"""Load new weights into a running engine in place, without missing or unknown ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specrl.models.directory import EMBEDDINGS, HEAD
from specrl.models.families import FAMILIES
from specrl.models.hf_io import TensorReader
from specrl.rollout.errors import RefitError
from specrl.rollout.vllm.weights.experts import pack_anew
from specrl.training.drafter.io import check_offsets

Weights = Iterable[tuple[str, Tensor]]
NOT_LOADED = frozenset({"t2d"})
"""The drafter's tensors that the engine derives from other tensors."""
MTP_MODULES = tuple(family.mtp for family in FAMILIES.values() if family.mtp is not None)


def policy_weight_names(directory: Path) -> frozenset[str]:
    """The names of the policy's tensors in its directory; multi-token-prediction layers are left out."""
    prefixes = tuple(module.prefix for module in MTP_MODULES)
    return frozenset(name for name in TensorReader(directory).names if not name.startswith(prefixes))


def drafter_weight_names(directory: Path) -> frozenset[str]:
    """The names of a drafter's tensors, or of the multi-token-prediction layer that drafts, if there is one."""
    names = TensorReader(directory).names
    return frozenset(name for name in names if any(module.drafts(name) for module in MTP_MODULES)) or names


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the policy in a directory, and the head of a tied model, as a refit expects them."""
    reader, names = TensorReader(directory), policy_weight_names(directory)
    for name in sorted(names):
        tensor = reader.read(name)
        yield name, tensor
        if name == EMBEDDINGS and HEAD not in names:
            yield HEAD, tensor


def check_own_head(drafter: nn.Module, policy: nn.Module, names: frozenset[str]) -> None:
    """Check that a drafter with a head on disk has its own in the engine: loading must not change the policy's."""
    if HEAD in names and getattr(drafter, "lm_head", None) is getattr(policy, "lm_head", policy):
        raise RefitError(
            "the engine drafts with the policy's head, because the drafter that it started with had an equal one; "
            "set drafter.epochs to at least 1, or take a drafter with a draft vocabulary smaller than the policy's"
        )


def reload_weights(
    vllm_config: Any,
    model: nn.Module,
    weights: Weights,
    required: frozenset[str],
    known: frozenset[str],
    *,
    tied: bool = False,
) -> None:
    """Load weights with on-disk names in place, and repack the linear weights and experts of CPU engines.

    A head tied to the embeddings has its own packed copy, which vLLM's reload does not update; it is repacked here.

    Args:
        required: The names of the tensors that must be given.
        known: The names of the tensors that may be given.
        tied: Whether the head is tied to the embeddings: an explicit head is then not loaded, but still compared.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import inplace

    missing, unknown = set(required), list[str]()

    def loaded() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            missing.discard(name)
            if name not in known:
                unknown.append(name)
            elif not (tied and name == HEAD):
                yield name, tensor

    with torch.inference_mode(), set_current_vllm_config(vllm_config):
        pack_anew(model)
        inplace.reload_weights(
            vllm_config,
            model,
            weights_iterator=loaded(),
            weights_path=None,
            is_checkpoint_format=True,
        )
        head, embeddings = getattr(model, "lm_head", None), getattr(model.model, "embed_tokens", None)
        if head is not None and embeddings is not None and head.weight is embeddings.weight:
            head.quant_method.process_weights_after_loading(head)
    # Only now, because an interrupted reload leaves layers that cannot be loaded again.
    if unknown:
        raise RefitError(f"refit was sent {', '.join(unknown)}, which the model on disk does not have")
    if missing:
        named = ", ".join(sorted(missing))
        raise RefitError(f"refit was not sent {named}; until one sends all, the engine's weights are incomplete")


def check_draft_vocabulary(drafter: nn.Module, vocab_size: int) -> None:
    """Raise RefitError if a draft token would map to none of the policy's tokens."""
    offsets: Tensor | None = getattr(drafter, "draft_id_to_target_id", None)
    if offsets is not None:
        try:
            check_offsets(offsets, vocab_size)
        except ValueError as error:
            raise RefitError(f"refit was sent a drafter whose {error}") from error
