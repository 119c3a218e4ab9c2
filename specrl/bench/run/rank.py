"""One rank of specrl's train stage, a step at a time: `python -m specrl.bench.run.rank CONTEXT.json PARENT`."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from specrl.bench.run.turns import Turns
from specrl.context import StageContext
from specrl.distributed import join, leave
from specrl.processes import end_with_parent
from specrl.progress import Progress
from specrl.stages import train
from specrl.tracking import Tracker


def run_rank(path: Path, parent: int) -> None:
    """Build the train stage without MLflow and take the loop's own steps, each when the parent says so."""
    end_with_parent(parent)
    turns = Turns()
    context = StageContext.load(path)
    ranks = join()
    with Progress(context.stage_dir, enabled=False) as progress:
        trainer = train.build(context, ranks, Tracker())
        first_step = trainer.restore()
        trainer.refit_engine(version=first_step)
        turns.done()
        for step in count(first_step):
            if not turns.wait():
                break
            trainer.step(step, progress)
            trainer.checkpoints.wait()  # or it would be written while another side takes its step
            turns.done()
        trainer.shutdown()
    leave()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]))
