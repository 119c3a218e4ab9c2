"""The model card of an exported drafter, or of a policy with a multi-token-prediction layer."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from specrl.artifacts import TrainResult, ValidateResult
from specrl.config import Config


def serve_command(policy_dir: Path, drafter_dir: Path, k: int) -> str:
    """Return the `vllm serve` command that uses the drafter.

    Args:
        drafter_dir: The drafter's directory; the same as `policy_dir` where a layer of the policy drafts.
        k: The number of tokens drafted per iteration.
    """
    if drafter_dir == policy_dir:
        speculative: dict[str, str | int] = {"method": "mtp", "num_speculative_tokens": k}
    else:
        speculative = {"method": "eagle3", "model": str(drafter_dir), "num_speculative_tokens": k}
    return shlex.join(["vllm", "serve", str(policy_dir), "--speculative-config", json.dumps(speculative)])


def model_card(
    config: Config, trained: TrainResult, validated: ValidateResult, acceptance_length: float, command: str
) -> str:
    """Return the card as Markdown: what was trained, the acceptance length and speedups, and how to serve it.

    Every figure in it was measured by this run.

    Args:
        acceptance_length: The acceptance length of the exported directory, loaded on its own into a new engine.
        command: The command that serves the exported directory.
    """
    speed = "\n".join(
        f"| {pair.batch} | {pair.speedup:.2f} | {pair.speedup_min:.2f} - {pair.speedup_max:.2f} |"
        for pair in validated.speed
    )
    return f"""# {_title(config, trained)}

| measured at k = {config.speculation.k}, temperature {config.sampling.temperature:g}, held-out prompts | |
|---|---|
| acceptance length, during validation | {validated.acceptance_length:.2f} |
| acceptance length of this directory, loaded on its own | {acceptance_length:.2f} |

| batch | generation speedup (median of matched pairs) | range |
|---|---|---|
{speed}

    {command}
"""


def _title(config: Config, trained: TrainResult) -> str:
    """Return the heading and the paragraph below it."""
    if trained.drafter_dir == trained.policy_dir:
        return f"""Policy of run {config.name}, with its multi-token-prediction layer

`{config.model.source}` after {trained.policy_step} steps of reinforcement learning by specrl. Its
multi-token-prediction layer was trained with it, on the policy's own hidden states and without a gradient to the
policy. Drafts never change what is sampled, only how fast."""
    return f"""EAGLE-3 drafter of run {config.name}

Trained together with its policy (`{config.model.source}`, version {trained.policy_step}) by specrl. It belongs to that
policy version alone: another version accepts fewer of its drafts. Drafts never change what is sampled, only how
fast."""
