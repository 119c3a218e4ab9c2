"""A small stage. What it does is set by the environment, which jobs inherit.

`DUMMY_PREPARE=3` takes 3 s, and goes on from where it was when it is started again; `fail` raises in the last rank,
`exit` ends that rank without a word, `join` joins the ranks.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from specrl.artifacts import Artifact, write_result
from specrl.context import StageContext
from specrl.progress import Progress, read_progress


class DummyResult(Artifact):
    ranks: list[int]
    threads: str
    code: str
    seconds: float


def main(context: StageContext) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with (context.stage_dir / f"starts-{rank}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    behaviour = os.environ.get(f"DUMMY_{context.stage.upper()}", "0")
    if behaviour == "fail" and rank == world_size - 1:
        raise ValueError("the stage went wrong,\nin two lines")
    if behaviour == "exit" and rank == world_size - 1:
        os._exit(7)
    seconds = float(behaviour) if behaviour.replace(".", "").isdigit() else 0.0
    with Progress(context.stage_dir, enabled=rank == 0) as progress:
        said = read_progress(context.stage_dir)
        for tick in range(int(said.done) if said else 0, int(10 * seconds)):
            progress.update(tick, 10 * seconds, unit="tick")
            time.sleep(0.1)
    if behaviour in ("fail", "exit"):
        time.sleep(30)  # as a rank that waits for one that is gone
    ranks = joined() if behaviour == "join" else [rank]
    if rank == 0:
        import specrl

        where = str(Path(specrl.__file__).parent.parent)
        threads = os.environ["OMP_NUM_THREADS"]
        write_result(context.stage_dir, DummyResult(ranks=ranks, threads=threads, code=where, seconds=seconds))


def joined() -> list[int]:
    from specrl.distributed import join, leave

    ranks = join()
    found = ranks.gather(ranks.rank)
    leave()
    return found
