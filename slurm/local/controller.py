"""The process that starts and watches the ranks of a local job, in a session of its own.

`python -m slurm.local.controller CONTEXT ENTRY CODE` outlives the flow that started it. While it lives, it holds a lock
beside its record; the kernel releases the lock however the process dies. On one machine, a stage's job is running if
and only if that lock is held, since process ids repeat.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from slurm.backend import Record, StageRequest
from slurm.environment import LOOPBACK, log_path
from slurm.ranks.supervisor import ATTEMPT, PREEMPTION_SIGNAL, WALLTIME_SIGNAL, warning_seconds
from specrl.artifacts import write_json
from specrl.context import StageContext
from specrl.lifetime.segments import Reason, begin_segment, end_segment, last_recorded_step, read_segments
from specrl.processes import port_of, start_ticks

KILLED = (-signal.SIGKILL, -signal.SIGABRT, -WALLTIME_SIGNAL, -PREEMPTION_SIGNAL, 128 + PREEMPTION_SIGNAL)
"""The exit codes of ranks that a signal ended. NCCL aborts a process whose peers are gone, and a rank hears the two
last signals only once it has been set up."""
JOB_ID, END_AT = "SPECRL_JOB_ID", "SPECRL_END_AT"
"""The variables in which the ranks find the controller's process id, and the Unix time at which it will end them."""

FAILURE_GRACE_SECONDS = 5
"""How long the other ranks may still run after one has failed, so that they notice it and say so in their logs."""
INTERRUPT_SECONDS = 1
"""How long ranks that are interrupted have until they are killed."""
LOCK_SECONDS = 3
"""How long the controller tries to take the lock, which a flow that looks whether it is taken holds for an instant."""


class Controller:
    """Starts the ranks, ends all of them when one fails, and starts them again where the stage is to go on, as a
    scheduler would queue its job again."""

    def __init__(self, request: StageRequest) -> None:
        self.request, self.stage_dir = request, request.context.stage_dir
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.exit_codes: list[int | None] = []
        self.timed_out = False
        signal.signal(signal.SIGTERM, lambda number, frame: self._send(number))

    def run(self) -> None:
        """Run the ranks, and run them again for as long as the stage is to go on."""
        for attempt in count():
            begun = len(read_segments(self.stage_dir))
            try:
                self._start(attempt)
                self._wait()
            finally:
                self._end()
            if not self._goes_on(begun):
                return

    def _start(self, attempt: int) -> None:
        resources, job_id = self.request.resources, str(os.getpid())
        shared = {
            "MASTER_PORT": os.environ.get("MASTER_PORT") or str(port_of(f"{job_id}-{attempt}")),
            "WORLD_SIZE": str(resources.ranks),
            "LOCAL_WORLD_SIZE": str(resources.ranks),  # this machine stands for all nodes
            ATTEMPT: str(attempt),
            JOB_ID: job_id,
            END_AT: str(time.time() + 60 * resources.minutes),
        }
        self.ranks = []
        for rank in range(resources.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log_path(self.request.key.folder, job_id, rank).open("ab") as log:
                command, environment = [sys.executable, *self.request.arguments], {**os.environ, **LOOPBACK, **shared}
                self.ranks.append(subprocess.Popen(command, env={**environment, **own}, stdout=log, stderr=log))

    def _wait(self) -> None:
        """Wait until all ranks have ended or are to be ended."""
        self.timed_out = False
        limit = time.monotonic() + 60 * self.request.resources.minutes
        warn_at: float | None = limit - warning_seconds(self.request.resources)
        give_up_at = limit
        while True:
            self.exit_codes = [rank.poll() for rank in self.ranks]
            now = time.monotonic()
            if None not in self.exit_codes or now > give_up_at:
                self.timed_out = None in self.exit_codes and now > limit
                return
            if any(self.exit_codes):  # one failed, or left to be started anew
                give_up_at = min(give_up_at, now + FAILURE_GRACE_SECONDS)
            if warn_at is not None and now > warn_at:
                warn_at = None
                self._send(WALLTIME_SIGNAL)
            time.sleep(0.1)

    def _end(self) -> None:
        self._send(signal.SIGINT)
        until = time.monotonic() + INTERRUPT_SECONDS
        while any(rank.poll() is None for rank in self.ranks) and time.monotonic() < until:
            time.sleep(0.01)
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(number)

    def _goes_on(self, begun: int) -> bool:
        segments, cluster = read_segments(self.stage_dir), self.request.key.cluster
        reason: Reason = "killed" if any(code in KILLED for code in self.exit_codes) else "failed"
        if self.timed_out:
            reason = "walltime"
        if len(segments) == begun:  # the ranks ended before they were set up
            segments.append(begin_segment(self.stage_dir, str(os.getpid()), os.uname().nodename))
        return end_segment(self.stage_dir, segments[-1].number, reason, last_recorded_step(self.stage_dir), cluster)


def main(arguments: list[str]) -> None:
    """Take the lock and run the job, unless another controller has the lock or the stage has finished."""
    context, entry, code = arguments
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    request = StageRequest(StageContext.load(Path(context)), entry, Path(code))
    record_path = request.key.record_path
    try:
        lock = FileLock(lock_path(record_path)).acquire(timeout=LOCK_SECONDS)
    except Timeout:
        return  # another controller was faster; the flow finds that one
    with lock:
        if request.result_path.exists():
            return
        started = start_ticks(os.getpid())
        Record("local", str(os.getpid()), started, os.uname().nodename, time.time()).write(record_path)
        controller = Controller(request)
        try:
            controller.run()
        finally:
            outcome = {"exit_codes": controller.exit_codes, "timed_out": controller.timed_out}
            write_json(outcome_path(request.key.folder, str(os.getpid())), outcome)


def lock_path(record_path: Path) -> Path:
    """The file that the controller of a job holds locked."""
    return record_path.with_suffix(".lock")


def outcome_path(folder: Path, job_id: str) -> Path:
    """The file that says how the ranks of a local job ended; it is missing if its controller was killed."""
    return folder / f"{job_id}_ended.json"


if __name__ == "__main__":
    main(sys.argv[1:])
