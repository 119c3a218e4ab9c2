"""The finished run that a benchmark measures. This imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrl.artifacts import PROMPTS_DIR, RESULT_FILE, PrepareResult, PretrainResult, TrainResult
from specrl.config import Config, ConfigError, StageName, change_config
from specrl.report.results import find_stages, finished, read_config


@dataclass(frozen=True)
class Subject:
    """A finished run, before and after its RL steps."""

    config: Config
    policy_dir: Path  # after the RL steps
    drafter_dir: Path | None  # after the RL steps
    first_policy_dir: Path  # before the RL steps
    stages: dict[StageName, Path]  # the finished stages before the RL steps

    @property
    def prompts_dir(self) -> Path:
        """The folder of the prompts that `prepare` began."""
        return self.stages["prepare"] / PROMPTS_DIR


def find_subject(run_dir: Path, changes: Sequence[str] = ()) -> Subject:
    """Find a finished run's policy and drafter; `changes` are `KEY=VALUE`, settings to measure with another value."""
    stages = find_stages(run_dir)
    prepared = finished(stages, "prepare", PrepareResult)
    pretrained = finished(stages, "pretrain", PretrainResult)
    trained = finished(stages, "train", TrainResult)
    if prepared is None or pretrained is None or trained is None:
        raise ConfigError(
            f"run {run_dir.name} has not finished training; continue it with: specrl resume {run_dir.name}"
        )
    before: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate")
    done = [stage for stage in before if stage in stages and (stages[stage].stage_dir / RESULT_FILE).exists()]
    return Subject(
        config=change_config(read_config(run_dir), list(changes)),
        policy_dir=trained.policy_dir,
        drafter_dir=trained.drafter_dir,
        first_policy_dir=prepared.policy_dir,
        stages={stage: stages[stage].stage_dir for stage in done},
    )
