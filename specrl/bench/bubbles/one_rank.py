"""One rank of one setting of `specrl bench bubbles`, in a process of its own: `one_rank CONTEXT.json PARENT`."""

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
    """Run the train stage without MLflow as one rank, for as long as the parent process lives."""
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
