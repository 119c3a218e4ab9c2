"""The finished run that a benchmark measures: its policy and drafter, and the settings that are changed for that.

This imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrl.artifacts import PrepareResult, PretrainResult, TrainResult
from specrl.config import Config, ConfigError, change_config
from specrl.lineage.changes import config_changes
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


def find_subject(run_dir: Path, changes: Sequence[str] = ()) -> Subject:
    """Return the policy and drafter of a finished run.

    Args:
        changes: As for `changed_config`.

    Raises:
        ConfigError: The run has not finished its `train` stage, or a change is not possible.
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
        config=changed_config(read_config(run_dir), changes),
        policy_dir=trained.policy_dir,
        drafter_dir=trained.drafter_dir,
        first_policy_dir=prepared.policy_dir,
        first_drafter_dir=pretrained.drafter_dir,
    )


def changed_config(config: Config, changes: Sequence[str]) -> Config:
    """Return the configuration of a run with the settings that a benchmark is to measure it with.

    Args:
        changes: `KEY=VALUE` each, of settings that a run may change while it goes on.

    Raises:
        ConfigError: A key, value or combination is wrong, or what the run has made before RL depends on it.
    """
    if not changes:
        return config
    changed = change_config(config, list(changes))
    fixed = [change.key for change in config_changes(config, changed) if not change.adjustable]
    if fixed:
        raise ConfigError(
            f"--set {', '.join(fixed)}: a benchmark measures what the run has made, so that --set may change only "
            "settings that a run may change while it goes on (README.md has the table); for others make a new run"
        )
    return changed


def check_taken(config: Config, changes: Sequence[str], measured: Sequence[Config]) -> None:
    """Check that a benchmark measures the settings that were changed, and does not set them itself.

    Args:
        config: The configuration of the run with the changes.
        measured: The configurations that the benchmark has made of it.

    Raises:
        ConfigError: It sets one of them itself wherever it measures.
    """
    undone = [{change.key for change in config_changes(config, own)} for own in measured]
    for key in (change.partition("=")[0].strip() for change in changes):
        if undone and all(any(f"{own}.".startswith(f"{key}.") for own in keys) for keys in undone):
            raise ConfigError(f"--set {key}: this benchmark sets it itself; its --help shows its own options")
