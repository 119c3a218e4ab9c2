"""What a stage's process is given: the configuration, where to write, and what earlier stages left."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from specrl.artifacts import ResultType, read_result, write_json
from specrl.config import Config, StageName, dump_config, parse_config


@dataclass(frozen=True)
class StageContext:
    """A stage is a module with `main(context) -> None`, run in every rank; rank 0 writes `result.json` last."""

    config: Config
    stage: StageName
    key: str
    """Content key: stage name, a dash, and a digest of inputs, config sections and code."""
    stage_dir: Path
    """`runs/NAME/stages/KEY`: everything the stage leaves, `result.json` last."""
    inputs: dict[StageName, Path]
    """Folders of the finished stages it reads."""
    mlflow_run_id: str
    """Parent run; the stage continues its own child below it."""

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    def input(self, stage: StageName, kind: type[ResultType]) -> ResultType:
        return read_result(self.inputs[stage], kind)

    def save(self, path: Path) -> None:
        write_json(
            path,
            {
                "config": json.loads(dump_config(self.config)),
                "stage": self.stage,
                "key": self.key,
                "stage_dir": self.stage_dir,
                "inputs": self.inputs,
                "mlflow_run_id": self.mlflow_run_id,
            },
        )

    @classmethod
    def load(cls, path: Path) -> StageContext:
        data = json.loads(path.read_text())
        return cls(
            config=parse_config(data["config"]),
            stage=data["stage"],
            key=data["key"],
            stage_dir=Path(data["stage_dir"]),
            inputs={stage: Path(folder) for stage, folder in data["inputs"].items()},
            mlflow_run_id=data["mlflow_run_id"],
        )
