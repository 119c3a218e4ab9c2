"""The work of the comparison: the run's train stage with the benchmark's sizes."""

from __future__ import annotations

import json
from pathlib import Path

from specrl.bench.job import BenchJob
from specrl.bench.settings import StepSettings, train_plainly
from specrl.config import Config, ConfigError, StageName, parse_config
from specrl.context import StageContext
from specrl.report.results import find_stages


def make_context(job: BenchJob, folder: Path, settings: StepSettings) -> StageContext:
    """Return the train stage of the run with the sizes of the comparison, in a folder of its own.

    Raises:
        ConfigError: The run has not finished the stages before RL.
    """
    stages = find_stages(job.run_dir)
    needed: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate")
    for stage in needed:
        if stage not in stages:
            raise ConfigError(
                f"run {job.run_dir.name} has not run {stage}; continue it with: specrl resume {job.run_dir.name}"
            )
    return StageContext(
        config=make_config(job.config, folder, settings),
        stage="train",
        key="train-step",
        stage_dir=folder / "stage",
        inputs={stage: stages[stage].stage_dir for stage in needed},
        mlflow_run_id="",
    )


def make_config(config: Config, folder: Path, settings: StepSettings) -> Config:
    """Return the run's configuration for the comparison: in BF16, with GRPO, and with no group left out.

    There is one step more than are taken, since after the last one a run writes a checkpoint and TRL would not.
    """
    data = json.loads(config.model_dump_json(by_alias=True))
    data |= {"name": folder.name, "runs_dir": str(folder.parent)}
    train_plainly(data, settings.warm_up + settings.steps + 1)
    data["train"] |= {"prompts_per_step": settings.prompts_per_step, "samples_per_prompt": settings.samples_per_prompt}
    data["train"] |= {"drop_zero_signal_groups": False, "updates_per_step": 1, "kl_coef": 0.0}
    data["train"] |= {"loss": "grpo", "advantage": "grpo"}
    data["policy"] |= {"lr_schedule": "constant", "lr_warmup_steps": 0, "tensor_parallel": 1, "pipeline_parallel": 1}
    data["engine"]["tensor_parallel"] = 1
    data["precision"] |= {"generation": "bf16", "training": "bf16", "kv_cache": "bf16"}
    data["sampling"]["max_response_tokens"] = settings.max_response_tokens
    threads = settings.threads // settings.ranks
    data["stage_resources"]["train"] = {"nodes": 1, "ranks_per_node": settings.ranks, "cpus_per_rank": threads}
    return parse_config(data)
