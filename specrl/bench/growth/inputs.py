"""A random policy of a given shape, and what the stages before RL would have left of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specrl.artifacts import CalibrateResult, PrepareResult, PretrainResult, write_result
from specrl.bench.growth.points import MODELS, Point
from specrl.bench.settings import train_plainly
from specrl.config import Config, parse_config
from specrl.context import StageContext
from specrl.models.directory import WEIGHTS_FILE
from specrl.models.hf_io import write_tensors
from specrl.models.tiny import write_tiny_model
from specrl.schemas import Rollout, rollout_path, write_rollouts

PROMPT_ROOM = 64
"""The most tokens of a prompt."""
MARK, NEVER = 1.0, -4.0
"""The first element of every embedding, and what the end token's logit has for it, so that no response ends early."""
PROBES = 4
"""The number of responses from which the refit takes its probe."""


def make_context(point: Point, folder: Path, steps: int) -> StageContext:
    """Write a policy and the results of the stages before RL to a folder, and return the context of its train stage.

    Args:
        steps: The number of steps that will be taken.
    """
    write_policy(point, folder / "policy")
    tokens = [5 + i % 90 for i in range(32)]
    rows = [Rollout(0, 0, 0, i, 0, 0, 0, [5, 6, 7], tokens, [0.0] * 32, "", "", "stop") for i in range(PROBES)]
    write_rollouts(rollout_path(folder / "rollouts", 0, 0), rows)
    write_result(folder / "prepare", PrepareResult(policy_dir=folder / "policy", seconds=0))
    write_result(
        folder / "pretrain",
        PretrainResult(
            drafter_dir=None, rollouts_dir=folder / "rollouts", num_responses=PROBES, reward_mean=0, seconds=0
        ),
    )
    write_result(
        folder / "calibrate",
        CalibrateResult(
            scales_path=folder / "none",
            layers_path=folder / "none",
            bf16_layers=[],
            kl_all_fp8=0,
            kl_chosen=0,
            seconds=0,
        ),
    )
    return StageContext(
        config=make_config(point, folder, steps),
        stage="train",
        key="train-growth",
        stage_dir=folder / "stage",
        inputs={"prepare": folder / "prepare", "pretrain": folder / "pretrain", "calibrate": folder / "calibrate"},
        mlflow_run_id="",
    )


def make_config(point: Point, folder: Path, steps: int) -> Config:
    """Return the configuration of the point: plain decoding in BF16, and no group left out."""
    data: dict[str, Any] = {
        "name": folder.name,
        "runs_dir": str(folder.parent),
        "model": {"source": str(folder / "policy"), **_limits(point)},
        "data": {
            "generators": [{"name": "worked_sums"}],
            "max_prompt_tokens": PROMPT_ROOM,
            "overlong": "truncate_left",
        },
        "sampling": {"max_response_tokens": point.response_tokens},
        "speculation": {"method": "none", "k": 0},
        "engine": {"max_num_seqs": point.prompts * point.samples, "kv_cache_gib": 0.5},
        "train": {
            "prompts_per_step": point.prompts,
            "samples_per_prompt": point.samples,
            "drop_zero_signal_groups": False,
        },
        "validate": {},
        "resources": {"ranks_per_node": point.ranks, "cpus_per_rank": 1},
    }
    train_plainly(data, steps + 1)  # after the last step of a run comes a checkpoint
    return parse_config(data)


def write_policy(point: Point, directory: Path) -> None:
    """Write a random policy of the point's shape whose responses all have the full length."""
    shape = MODELS[point.model]
    tiny = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
    }
    model, sampling = {"source": "tiny", "tiny": tiny, **_limits(point)}, {"max_response_tokens": point.response_tokens}
    small = parse_config({"name": "growth", "model": model, "sampling": sampling})
    write_tiny_model(small.model, 0, directory)
    hf = AutoConfig.from_pretrained(directory)
    hf.update({"vocab_size": shape.vocab_size, "tie_word_embeddings": False})
    weights = AutoModelForCausalLM.from_config(hf, dtype=torch.bfloat16).state_dict()
    weights["model.embed_tokens.weight"][:, 0] = MARK
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][hf.eos_token_id] = 0.0
    weights["lm_head.weight"][hf.eos_token_id, 0] = NEVER
    write_tensors(directory / WEIGHTS_FILE, weights)
    hf.save_pretrained(directory)


def _limits(point: Point) -> dict[str, Any]:
    return {"max_length": PROMPT_ROOM + point.response_tokens, "dtype": "bfloat16"}
