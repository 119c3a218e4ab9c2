"""The process of one rank of the train stage, which takes one step at a time; see `Worker`."""

from __future__ import annotations

from itertools import count
from multiprocessing.connection import Connection

from specrl.context import StageContext
from specrl.distributed import join, leave
from specrl.processes import end_with_parent
from specrl.progress import Progress
from specrl.tracking.tracker import Tracker


def main(parent: Connection) -> None:
    """Build the train stage without MLflow and take the steps of its loop, each when the parent asks for it."""
    end_with_parent(parent.recv())
    from specrl.stages import train  # slow; the parent may end meanwhile

    context = StageContext.load(parent.recv())
    ranks = join()
    with Progress(context.stage_dir, enabled=False) as progress:
        trainer = train.build(context, ranks, Tracker())
        trainer.validation.best_metric = None  # a checkpoint of the best policy would count as time
        first_step = trainer.restore()
        trainer.refit_engine(version=first_step)
        parent.send(None)
        for step in count(first_step):
            try:
                parent.recv()
            except EOFError:  # no more steps
                break
            trainer.step(step, progress)
            trainer.checkpoints.wait()  # or it would be written during another training's step
            parent.send(None)
        trainer.shutdown()
    leave()
