"""How every rank of a stage begins and ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specrl import logs
from specrl.context import StageContext
from specrl.distributed import Ranks, join, leave
from specrl.progress import Progress
from specrl.tracking.runs import stage_run
from specrl.tracking.tracker import Tracker


@contextmanager
def stage_rank(context: StageContext) -> Iterator[tuple[Ranks, Tracker, Progress]]:
    """Join the other ranks of the stage; leave them after the block, unless it raises."""
    logs.set_up(context.config.cluster.log_level)
    ranks = join()
    with stage_run(context, ranks) as tracker, Progress(context.stage_dir, enabled=ranks.is_first) as progress:
        yield ranks, tracker, progress
    leave()
