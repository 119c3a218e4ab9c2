"""Making, loading and writing the trained drafter that `speculation.method` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

from specrl.config import Config
from specrl.distributed import Ranks, sum_arrays
from specrl.schemas import Rollout
from specrl.training.drafter.kinds.mtp import Mtp
from specrl.training.drafter.trainer import Drafter, choose_draft_vocabulary, count_tokens
from specrl.training.megatron.policy import Policy


def new_drafter(
    config: Config, policy_dir: Path, responses: Sequence[Rollout], ranks: Ranks, source_dir: Path | None = None
) -> Drafter:
    """The drafter that pretraining starts from: the policy's layer, `drafter.source`, or a new one (collective).

    EAGLE-3's draft vocabulary is chosen from the responses of all ranks, of which this rank has some.
    """
    if config.speculation.draft_method.is_policy_layer:
        return Drafter.of_policy(policy_dir, config.drafter, ranks, config.seed)
    if source_dir is not None:
        return Drafter.load(source_dir, policy_dir, config.drafter, ranks, config.seed)
    vocab_size = AutoConfig.from_pretrained(policy_dir).vocab_size
    counts = sum_arrays(ranks, count_tokens([response.response_tokens for response in responses], vocab_size))
    draft_tokens = choose_draft_vocabulary(counts, config.drafter.draft_vocab_size)
    return Drafter.create(policy_dir, config.drafter, draft_tokens, ranks, config.seed)


def load_drafter(config: Config, drafter_dir: Path, policy_dir: Path, ranks: Ranks) -> Drafter:
    if config.speculation.draft_method.is_policy_layer:
        return Drafter.of_policy(drafter_dir, config.drafter, ranks, config.seed)
    return Drafter.load(drafter_dir, policy_dir, config.drafter, ranks, config.seed)


def save_drafter(drafter: Drafter, policy: Policy, directory: Path, policy_version: int) -> None:
    """Write an EAGLE-3 directory, or the whole policy with its multi-token-prediction layer (collective)."""
    if isinstance(drafter.model, Mtp):
        policy.save_pretrained(directory, drafter.named_weights())
    elif policy.ranks.is_first:
        drafter.save(directory, policy_version)


def save_policy(
    policy: Policy, drafter: Drafter | None, policy_dir: Path, drafter_dir: Path, version: int
) -> Path | None:
    """Write policy and drafter; return the drafter's directory, which a policy's own layer shares (collective)."""
    if drafter is not None and isinstance(drafter.model, Mtp):
        save_drafter(drafter, policy, policy_dir, version)
        return policy_dir
    policy.save_pretrained(policy_dir)
    if drafter is None:
        return None
    save_drafter(drafter, policy, drafter_dir, version)
    return drafter_dir
