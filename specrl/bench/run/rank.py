"""The process of one rank of specrl's train stage, which takes a step at a time; see `Worker`."""

from __future__ import annotations

from itertools import count
from multiprocessing.connection import Connection

from specrl.context import StageContext
from specrl.distributed import join, leave
from specrl.processes import end_with_parent
from specrl.progress import Progress
from specrl.tracking.tracker import Tracker


def main(parent: Connection) -> None:
    """Build the train stage without MLflow and take the loop's own steps, each when the parent says so."""
    end_with_parent(parent.recv())
    from specrl.stages import train  # takes long, during which the parent may end

    context = StageContext.load(parent.recv())
    ranks = join()
    with Progress(context.stage_dir, enabled=False) as progress:
        trainer = train.build(context, ranks, Tracker())
        first_step = trainer.restore()
        trainer.refit_engine(version=first_step)
        parent.send(None)
        for step in count(first_step):
            try:
                parent.recv()
            except EOFError:  # there are no more steps
                break
            trainer.step(step, progress)
            trainer.checkpoints.wait()  # or it would be written while another side takes its step
            parent.send(None)
        trainer.shutdown()
    leave()
