"""The process of one rank in `specrl bench bubbles`: `python -m specrl.bench.bubbles.one_rank CONTEXT.json PARENT`."""

from __future__ import annotations

import sys
from pathlib import Path

from specrl.artifacts import PretrainResult
from specrl.context import StageContext
from specrl.distributed import join, leave
from specrl.processes import end_with_parent
from specrl.progress import Progress
from specrl.stages import train
from specrl.tracking import Silent


def run_rank(path: Path, parent: int) -> None:
    """Run the train stage without MLflow as one rank, and end with the parent process.

    Args:
        path: The file with the stage's context.
        parent: The process id of the parent.
    """
    end_with_parent(parent)
    context = StageContext.load(path)
    ranks = join()
    with Progress(context.stage_dir, enabled=False) as progress:
        trainer = train.build(context, ranks, Silent())
        first_step = trainer.restore(context.input("pretrain", PretrainResult).rollouts_dir)
        trainer.run(first_step, progress)
        trainer.engine.shutdown()
    leave()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]))
