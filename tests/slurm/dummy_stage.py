"""A small stage. What it does is set by the environment, which jobs inherit.

`DUMMY_PREPARE=3` takes 3 s, and goes on from where it was when it is started again; `hold` goes on until a test calls
`release`, `wait` on its first start until the job is left. `fail` raises in the last rank, `exit` ends that one without
a word, `kill` kills it each time, `join` joins the ranks. `steps` takes steps, as training does. On the first start,
`block` has the first rank wait in a collective for one that is asleep, is killed (`lose`) or raises an error (`raise`),
and `freeze` stops the last rank, as a machine that hangs would.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from specrl import lifetime
from specrl.artifacts import Artifact, write_result, write_text
from specrl.context import StageContext
from specrl.lifetime import LeftJobError
from specrl.lifetime.segments import read_segments
from specrl.progress import Progress, read_progress

HELD_SECONDS = 600
"""The longest time for which a stage is held, so that a test that fails leaves nothing behind for ever."""
RELEASED = "released"


def release(run_dir: Path, stage: str) -> None:
    """Let a stage end that is held."""
    for folder in run_dir.glob(f"stages/{stage}-*"):
        (folder / RELEASED).touch()


class DummyResult(Artifact):
    ranks: list[int]
    threads: str
    code: str
    seconds: float


def main(context: StageContext) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with (context.stage_dir / f".starts-{rank}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    behaviour = os.environ.get(f"DUMMY_{context.stage.upper()}", "0")
    if behaviour == "fail" and rank == world_size - 1:
        raise ValueError("the stage went wrong,\nin two lines")
    misbehave(context, behaviour, rank, world_size)
    if behaviour == "exit" and rank == world_size - 1:
        os._exit(7)
    seconds = float(behaviour) if behaviour.replace(".", "").isdigit() else 0.0
    with Progress(context.stage_dir, enabled=rank == 0) as progress:
        said = read_progress(context.stage_dir)
        for tick in range(int(said.done) if said else 0, int(10 * seconds)):
            progress.update(tick, 10 * seconds, unit="tick")
            time.sleep(0.1)
    until = time.monotonic() + HELD_SECONDS
    while behaviour == "hold" and not (context.stage_dir / RELEASED).exists() and time.monotonic() < until:
        time.sleep(0.05)
    if behaviour in ("fail", "exit"):
        time.sleep(30)  # as a rank that waits for one that is gone
    if behaviour in ("steps", "stuck") and rank == 0:
        walk(context)
    while behaviour == "steps" and rank > 0 and not (context.stage_dir / "result.json").exists():
        time.sleep(0.1)
    ranks = joined() if behaviour == "join" else [rank]
    if rank == 0:
        import specrl

        where = str(Path(specrl.__file__).parent.parent)
        threads = os.environ["OMP_NUM_THREADS"]
        write_result(context.stage_dir, DummyResult(ranks=ranks, threads=threads, code=where, seconds=seconds))


def misbehave(context: StageContext, behaviour: str, rank: int, world_size: int) -> None:
    is_first_start = len((context.stage_dir / f".starts-{rank}").read_text().splitlines()) == 1
    if behaviour in ("block", "lose", "raise") and is_first_start:
        from specrl.distributed import join

        ranks = join()
        if rank > 0 and behaviour == "lose":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank > 0 and behaviour == "raise":
            raise ValueError("the stage went wrong")
        time.sleep(100 * rank)
        ranks.gather(0)
    while behaviour == "kill" and all(segment.reason for segment in read_segments(context.stage_dir)):
        time.sleep(0.02)  # the job has not begun on the first rank
    if rank == world_size - 1 and (behaviour == "kill" or (behaviour == "freeze" and is_first_start)):
        os.kill(os.getpid(), signal.SIGKILL if behaviour == "kill" else signal.SIGSTOP)
    if behaviour == "kill" or (behaviour == "freeze" and is_first_start):
        time.sleep(100)  # as a rank that waits for one that is gone
    if behaviour == "wait" and is_first_start:
        time.sleep(HELD_SECONDS)


class Alone:
    """The ranks of a job with one rank."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def walk(context: StageContext) -> None:
    """Take `DUMMY_STEPS` steps, with a checkpoint when the job is left; on its first start `stuck` never ends a step.

    A step takes a quarter second on the first `DUMMY_DISTURBED` starts, and little time after them.
    """
    start = len((context.stage_dir / ".starts-0").read_text().splitlines())
    stuck = start == 1 and os.environ[f"DUMMY_{context.stage.upper()}"] == "stuck"
    pause = 0.25 if start <= int(os.environ.get("DUMMY_DISTURBED", "1")) else 0.02
    life, checkpoint = lifetime.current(), context.stage_dir / "checkpoint"
    life.expect_steps()
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    life.begin_steps(first)
    for step in range(first, int(os.environ["DUMMY_STEPS"])):
        if (stop := life.at_boundary(Alone(), step)) is not None:
            write_text(checkpoint, str(step))
            raise LeftJobError(stop)
        with (context.stage_dir / "steps.txt").open("a") as file:
            file.write(f"{step}\n")
        time.sleep(100 if step == 3 and stuck else pause)
    life.end_steps()


def joined() -> list[int]:
    from specrl.distributed import join, leave

    ranks = join()
    found = ranks.gather(ranks.rank)
    leave()
    return found
