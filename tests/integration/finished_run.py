"""A toy run that has finished training, as benchmarks and faults begin from."""

from __future__ import annotations

import json
from pathlib import Path

from specrl.artifacts import (
    CalibrateResult,
    ExportResult,
    PrepareResult,
    PretrainResult,
    TrainResult,
    write_result,
    write_text,
)
from specrl.config import Config, dump_config
from specrl.models.families import LLAMA
from specrl.precision.recipe import Recipe, write_recipe
from specrl.schemas import Rollout, rollout_path, write_rollouts
from tests.exactness.toy import likely_tokens, policy_weights, toy_config, write_policy, write_trained_drafter


def write_finished_run(runs_dir: Path) -> Path:
    """A run that has finished training, with nothing in it but what a benchmark reads."""
    values = json.loads(dump_config(toy_config("eagle3", 3))) | {"runs_dir": str(runs_dir)}
    values["drafter"] |= {"draft_vocab_size": 10, "tokens_per_micro_batch": 2048}
    values["resources"] |= {"cpus_per_rank": 1}
    config = Config.model_validate(values)
    write_text(config.run_dir / "config.json", dump_config(config))
    policy_dir = write_policy(config.run_dir / "policy", policy_weights(0))
    drafter_dir = write_trained_drafter(config.run_dir / "drafter", policy_dir)
    tokens = likely_tokens() * 2
    rows = [Rollout(0, 0, 0, i, 0, 0, 0, [5, 6, 7], tokens, [0.0] * len(tokens), "", "", "stop") for i in range(4)]
    write_rollouts(rollout_path(config.run_dir / "rollouts", 0, 0), rows)
    pretrained = PretrainResult(
        drafter_dir=drafter_dir, rollouts_dir=config.run_dir / "rollouts", num_responses=1, reward_mean=0.0, seconds=1.0
    )
    trained = TrainResult(
        policy_dir=policy_dir,
        drafter_dir=drafter_dir,
        policy_step=1,
        steps=1,
        step_seconds_median=1.0,
        timing_share={},
        reward_first=0.0,
        reward_last=0.0,
        mismatch={},
        seconds=1.0,
        acceptance_length=1.0,
        acceptance_rate_per_pos=[],
        refit_checks=1,
        refit_failures=0,
        refit_max_abs_logprob_diff=0.0,
    )
    num_layers = json.loads((policy_dir / "config.json").read_text())["num_hidden_layers"]
    write_recipe(config.run_dir / "scales.json", Recipe(LLAMA, num_layers), policy_dir)
    calibrated = CalibrateResult(
        scales_path=config.run_dir / "scales.json",
        layers_path=config.run_dir,
        bf16_layers=[],
        kl_all_fp8=0.0,
        kl_chosen=0.0,
        seconds=1.0,
    )
    results = {
        "prepare": PrepareResult(policy_dir=policy_dir, seconds=1.0),
        "calibrate": calibrated,
        "pretrain": pretrained,
        "train": trained,
        "export": ExportResult(policy_dir=policy_dir, drafter_dir=drafter_dir, vllm_acceptance_length=1.5, seconds=1.0),
    }
    for stage, result in results.items():
        write_result(config.run_dir / "stages" / f"{stage}-0", result)
    return config.run_dir
