"""Everything that ends a job on a cluster, done to one stage of a run on the development cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from slurm.supervisor import WALLTIME_SIGNAL, WARNING_SECONDS
from specrl.lifetime.segments import Segment, read_segments

SECONDS = 600
"""Within which each thing happens, on the slowest machine."""
RELEASED = "released"


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ranks_of(run_dir: Path) -> list[int]:
    """Process ids of the ranks that work for a run."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if (words := process.info["cmdline"] or [])[2:4] == ["-m", "slurm.entry"] and str(run_dir) in " ".join(words)
    ]


def reward_workers(run_dir: Path) -> list[psutil.Process]:
    """The processes that compute the rewards of a run's ranks."""
    found = []
    for rank in ranks_of(run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [
                process
                for child in psutil.Process(rank).children()
                if "rewards.worker" in " ".join(child.cmdline())
                for process in (child, *child.children(recursive=True))  # the one that scores is the first's child
            ]
    return found


def held(run_dir: Path, stage: str) -> str:
    """A set-up line by which the ranks of a stage's jobs wait for `Disturbed.cut_short`."""
    wait = f"for _ in $(seq 6000); do test -e {run_dir / RELEASED} && break; sleep 0.1; done"
    return f"case $SLURM_JOB_NAME in {stage}-*) {wait};; esac"


class Disturbed:
    """The job of one stage, which Slurm starts again and again."""

    def __init__(self, run_dir: Path, stage: str) -> None:
        self.run_dir, self.stage = run_dir, stage

    def segments(self) -> list[Segment]:
        return [found for folder in self.run_dir.glob(f"stages/{self.stage}-*") for found in read_segments(folder)]

    def reasons(self) -> list[str | None]:
        return [segment.reason for segment in self.segments()]

    def running(self, number: int) -> str:
        """The job's id, once the first rank of the segment with this number is at work."""
        wait_until(lambda: len(self.segments()) == number)
        return self.segments()[-1].job_id

    def takes_steps(self, number: int) -> None:
        """Wait until the segment with this number takes steps."""
        self.running(number)
        wait_until(lambda: self.segments()[-1].first_step is not None)

    @contextlib.contextmanager
    def in_first_step(self, number: int) -> Iterator[None]:
        """Keep the segment with this number in its first step, which waits for rewards meanwhile."""
        self.running(number)
        wait_until(lambda: reward_workers(self.run_dir))
        workers = reward_workers(self.run_dir)
        for worker in workers:
            worker.suspend()
        self.takes_steps(number)
        yield
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):  # its rank was killed
                worker.resume()

    def cut_short(self, seconds: int) -> None:
        """Take most of its time from the first job, before its first rank asks when it ends.

        Its set-up has the line `held`. Slurm looks every 30 s which jobs are to be warned, and warns each once; a rank
        that has not been set up does not survive that, so the warning must come while none has been started.
        """
        running = ("squeue", "-h", "-t", "running", "-o", "%i %j")
        wait_until(lambda: f" {self.stage}-" in slurm(*running))
        job_id = next(line.split()[0] for line in slurm(*running).splitlines() if f" {self.stage}-" in line)
        log = Path(os.environ["SLURM_CONF"]).parents[1] / "log" / "slurmctld.log"
        slurm("scontrol", "setdebug", "debug")  # only so does Slurm write that it has warned a job
        slurm("scontrol", "update", f"JobId={job_id}", f"EndTime=now+{WARNING_SECONDS}")
        wait_until(lambda: f"warning signal {WALLTIME_SIGNAL:d} to JobId={job_id}\n" in log.read_text())
        slurm("scontrol", "setdebug", "info")
        slurm("scontrol", "update", f"JobId={job_id}", f"EndTime=now+{seconds}")
        (self.run_dir / RELEASED).touch()
        wait_until(lambda: self.reasons()[:1] == ["walltime"])
        slurm("scontrol", "update", f"JobId={job_id}", "TimeLimit=10")

    def queue_again(self, number: int) -> None:
        """As a user does by hand."""
        slurm("scontrol", "requeue", self.running(number))

    def lose_a_node(self, number: int) -> None:
        """Which comes back by itself."""
        self.running(number)
        slurm("scontrol", "update", "NodeName=node1", "State=down", "Reason=test")

    def preempt(self, number: int) -> None:
        """Without grace, by a job that takes all nodes."""
        self.running(number)
        slurm("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")

    def freeze_a_rank(self, number: int) -> None:
        """As a machine that does not answer any more, while steps are taken."""
        self.takes_steps(number)
        places = {int(psutil.Process(rank).environ()["SLURM_PROCID"]): rank for rank in ranks_of(self.run_dir)}
        wait_until(lambda: list(self.run_dir.glob(f"jobs/{self.stage}-*/heartbeats/*/rank-{max(places)}")))
        os.kill(places[max(places)], signal.SIGSTOP)
