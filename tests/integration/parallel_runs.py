"""Stages of a tiny policy with experts on layouts of ranks: `python -m tests.integration.parallel_runs FOLDER`.

One run goes from `prepare` to `export` with everything over two ranks; other layouts repeat its stage `train`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.stage_runs import Sections, config_of, import_stages, parent_run, run_stage

# isort: split
from specrl.config import STAGES, Config, StageName

MAIN = "tensor"
LAYOUTS: dict[str, Sections] = {
    MAIN: {"policy": {"tensor_parallel": 2}, "engine": {"tensor_parallel": 2}},
    "alone": {},
    "pipeline": {"policy": {"pipeline_parallel": 2}},
    "experts": {"policy": {"expert_parallel": 2}},
}
"""The layouts of `train`, by name; all but `alone` have two ranks."""
EXPERTS: Sections = {"model": {"tiny": {"family": "qwen3_moe"}}}


def layout(folder: Path, name: str) -> Config:
    config = config_of(folder, name, {**EXPERTS, **LAYOUTS[name]}, ranks=1 if name == "alone" else 2)
    return config.model_copy(update={"seed": 8})  # with 7 a token is nearly as well off with another expert


def main(folder: Path) -> None:
    import_stages()
    config, stages = layout(folder, MAIN), dict[StageName, Path]()
    mlflow_run = parent_run(config)
    for stage in STAGES:
        stages[stage] = run_stage(config, stage, stages, mlflow_run)
    for name in LAYOUTS.keys() - {MAIN}:
        other = layout(folder, name)
        run_stage(other, "train", stages, parent_run(other))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
