"""The policy and drafter of a finished run, which a benchmark measures. This imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrl.artifacts import PrepareResult, PretrainResult, TrainResult
from specrl.config import Config, ConfigError
from specrl.report.results import find_stages, finished, read_config


@dataclass(frozen=True)
class Subject:
    """The models of a finished run, before and after its RL steps."""

    config: Config
    policy_dir: Path
    """The policy after the RL steps."""
    drafter_dir: Path | None
    """The drafter after the RL steps; None if the run has none."""
    first_policy_dir: Path
    """The policy before the RL steps."""
    first_drafter_dir: Path | None
    """The drafter as it was pretrained; None if the run has none."""


def find_subject(run_dir: Path) -> Subject:
    """Return the policy and drafter of a finished run.

    Raises:
        ConfigError: The run has not finished its `train` stage.
    """
    stages = find_stages(run_dir)
    prepared = finished(stages, "prepare", PrepareResult)
    pretrained = finished(stages, "pretrain", PretrainResult)
    trained = finished(stages, "train", TrainResult)
    if prepared is None or pretrained is None or trained is None:
        raise ConfigError(
            f"run {run_dir.name} has not finished training; continue it with: specrl resume {run_dir.name}"
        )
    return Subject(
        config=read_config(run_dir),
        policy_dir=trained.policy_dir,
        drafter_dir=trained.drafter_dir,
        first_policy_dir=prepared.policy_dir,
        first_drafter_dir=pretrained.drafter_dir,
    )
