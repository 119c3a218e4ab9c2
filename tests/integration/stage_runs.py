"""Stages of small runs in one process tree: everything is imported once, and the ranks of each stage are forked."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling one small kernel takes longer than a stage
from specrl.config import STAGES, Config, StageName, parse_config
from specrl.context import StageContext
from specrl.keys import INPUTS
from specrl.tracking.runs import start_parent_run
from specrl.tracking.store import import_mlflow
from tests.forks import fork, import_engine, wait

Sections = Mapping[str, Mapping[str, Any]]
SECTIONS: Sections = {
    "model": {"source": "tiny", "dtype": "float32", "max_length": 64},
    "data": {"reward": "tests.integration.loop_plan:reward"},
    "warm_start": {"num_examples": 64, "batch_size": 32, "lr": 2e-3},
    "sampling": {"max_response_tokens": 24},
    "speculation": {"method": "eagle3", "k": 3, "adaptive": False},
    "engine": {"max_num_seqs": 16, "kv_cache_gib": 0.0625},
    "policy": {"lr": 1e-4, "tokens_per_micro_batch": 256},
    "drafter": {"num_prompts": 8, "samples_per_prompt": 2, "draft_vocab_size": 64, "epochs": 2},
    "train": {"num_steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4},
    "precision": {"calibration_tokens": 128},
    "bubbles": {"use": "none"},
    "validate": {
        "num_prompts": 4,
        "speed_batches": [4],
        "speed_prompts": 4,
        "speed_repeats": 1,
        "exactness_prompts": 4,
    },
}


def config_of(folder: Path, name: str, changes: Sections, ranks: int = 1) -> Config:
    """The configuration of a run in `folder` on this number of ranks: `SECTIONS`, changed key by key."""
    sections = {
        section: {**SECTIONS.get(section, {}), **changes.get(section, {})} for section in {**SECTIONS, **changes}
    }
    resources = {"ranks_per_node": ranks, "cpus_per_rank": 1}
    return parse_config({"name": name, "seed": 7, "runs_dir": str(folder), "resources": resources, **sections})


def import_stages() -> None:
    import_engine()
    import_mlflow()
    for stage in STAGES:
        import_module(f"specrl.stages.{stage}")


def run_stage(config: Config, stage: StageName, inputs: Mapping[StageName, Path], mlflow_run: str) -> Path:
    """Run a stage on ranks of its own; return its folder."""
    started, folder = time.monotonic(), config.run_dir / "stages" / f"{stage}-0"
    folder.mkdir(parents=True, exist_ok=True)
    context = StageContext(
        config, stage, f"{stage}-0", folder, {name: inputs[name] for name in INPUTS[stage]}, mlflow_run
    )
    wait(fork(config.resources.ranks, lambda rank: import_module(f"specrl.stages.{stage}").main(context)))
    print(config.name, stage, f"{time.monotonic() - started:.1f} s", flush=True)
    return folder


def parent_run(config: Config) -> str:
    """Create the run in MLflow, in a process of its own: no connection to a database may outlive a fork."""
    wait(fork(1, lambda rank: start_parent_run(config) and None))
    return (config.run_dir / "mlflow_run_id").read_text().strip()
