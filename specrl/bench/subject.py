"""The finished run that a benchmark measures. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrl.artifacts import PROMPTS_DIR, RESULT_FILE, PrepareResult, TrainResult
from specrl.config import Config, StageName, change_config
from specrl.report.results import find_stages, read_config, result_of


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
        """The folder of prompts that `prepare` started."""
        return self.stages["prepare"] / PROMPTS_DIR


def find_subject(run_dir: Path, changes: Sequence[str] = ()) -> Subject:
    """Find a finished run's policy and drafter; `changes` are `KEY=VALUE`, settings changed for the benchmark."""
    trained, prepared = result_of(run_dir, "train", TrainResult), result_of(run_dir, "prepare", PrepareResult)
    stages = find_stages(run_dir)
    before: tuple[StageName, ...] = ("prepare", "pretrain", "calibrate")
    return Subject(
        config=change_config(read_config(run_dir), list(changes)),
        policy_dir=trained.policy_dir,
        drafter_dir=trained.drafter_dir,
        first_policy_dir=prepared.policy_dir,
        stages={stage: stages[stage] for stage in before if stage in stages and (stages[stage] / RESULT_FILE).exists()},
    )
