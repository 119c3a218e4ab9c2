"""The model card of an exported drafter: what it belongs to, how good it was, how to serve it."""

from __future__ import annotations

import json
from pathlib import Path

from specrl.artifacts import TrainResult, ValidateResult
from specrl.config import Config


def serve_command(policy_dir: Path, drafter_dir: Path, k: int) -> str:
    """The `vllm serve` line that uses the drafter."""
    speculative = {"method": "eagle3", "model": str(drafter_dir), "num_speculative_tokens": k}
    return f"vllm serve {policy_dir} --speculative-config '{json.dumps(speculative)}'"


def model_card(
    config: Config, trained: TrainResult, validated: ValidateResult, acceptance_length: float, command: str
) -> str:
    """Markdown; every figure in it was measured by this run."""
    speed = "\n".join(
        f"| {pair.batch} | {pair.speedup:.2f} | {pair.speedup_min:.2f} - {pair.speedup_max:.2f} |"
        for pair in validated.speed
    )
    return f"""# EAGLE-3 drafter of run {config.name}

Trained together with its policy (`{config.model.source}`, version {trained.steps}) by specrl. It belongs to that policy
version alone: another version accepts fewer of its drafts. Drafts never change what is sampled, only how fast.

| measured at k = {config.speculation.k}, temperature {config.sampling.temperature:g}, held-out prompts | |
|---|---|
| acceptance length, during validation | {validated.acceptance_length:.2f} |
| acceptance length of this directory, loaded on its own | {acceptance_length:.2f} |

| batch | generation speedup (median of matched pairs) | range |
|---|---|---|
{speed}

    {command}
"""
