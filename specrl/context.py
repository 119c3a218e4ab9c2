"""The context of a stage: its configuration, the folder that it writes to, and the results of earlier stages."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from specrl.artifacts import PROMPTS_DIR, Artifact, read_file, read_result, write_json
from specrl.config import Config, StageName
from specrl.lineage.record import Continuation


@dataclass(frozen=True)
class StageContext:
    """The argument of a stage: a module with `main(context) -> None`, called in every rank.

    Rank 0 writes `result.json` last.
    """

    config: Config
    stage: StageName
    key: str  # the content key: the stage's name, a dash, and a digest of its inputs, configuration sections and code
    stage_dir: Path  # the folder of all output of the stage, `runs/NAME/stages/KEY`
    inputs: dict[StageName, Path]  # the folders of the finished stages that this one reads, by stage
    mlflow_run_id: str  # the run's MLflow run; the stage resumes its own child run
    continues: Continuation | None = None
    """The checkpoint of another stage that this one continues; None if it starts from its inputs alone."""
    device_bytes: int = 0
    """The GPU memory planned for a rank, apart from the engine's share; 0 if unknown."""

    @property
    def run_dir(self) -> Path:
        """The folder of the whole run, `runs/NAME`."""
        return self.config.run_dir

    @property
    def prompts_dir(self) -> Path:
        """The folder of the shards of problems, which `prepare` begins and every stage may extend."""
        return self.inputs.get("prepare", self.stage_dir) / PROMPTS_DIR

    def input[Result: Artifact](self, stage: StageName, kind: type[Result]) -> Result:
        """The result of an earlier stage; ValueError if it has not finished."""
        return read_result(self.inputs[stage], kind)

    def check(self) -> None:
        """Check that a job of the run reads and writes only within the run's folder."""
        start = [self.continues.stage_dir] if self.continues is not None else []
        for folder in (self.stage_dir, *self.inputs.values(), *start):
            if not Path(os.path.normpath(folder)).is_relative_to(os.path.normpath(self.run_dir)):
                raise ValueError(f"the context of {self.key} leads out of {self.run_dir}: {folder}")

    def save(self, path: Path) -> None:
        write_json(path, _CONTEXT.dump_python(self, mode="json", by_alias=True))

    @classmethod
    def load(cls, path: Path) -> StageContext:
        """Read a context that `save` wrote."""
        return _CONTEXT.validate_json(read_file(path))


_CONTEXT = TypeAdapter(StageContext)
