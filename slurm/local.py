"""Jobs on this machine, started by a controller that outlives the flow.

`python -m slurm.local CONTEXT ENTRY CODE` is the controller: a process in its own session that starts and watches the
ranks. While it lives, it holds a lock beside its record, which the kernel releases however the process dies. On one
machine, a stage's job is running if and only if that lock is held; process ids would not do, because they are reused.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from slurm.backend import Failure, JobError, JobKey, JobPlace, Record, StageRequest, State
from slurm.environment import LOOPBACK, inherited, log_path
from slurm.failures import first_error
from slurm.supervisor import AGAIN_CODE, ATTEMPT, KILLING, PREEMPTION_SIGNAL, WALLTIME_SIGNAL, warning_seconds
from specrl.artifacts import write_json
from specrl.config import Config, StageName
from specrl.context import StageContext
from specrl.lifetime.segments import Reason, Segment, begin_segment, end_segment, last_recorded_step, read_segments
from specrl.processes import end_with_parent, interrupts_held, is_locked, last_line, port_of, start_ticks

KILLED = (*(-number for number in KILLING), 128 + PREEMPTION_SIGNAL, AGAIN_CODE)
"""The exit codes of ranks that a signal ended, or that could not record why another job must follow."""
JOB_ID, END_AT = "SPECRL_JOB_ID", "SPECRL_END_AT"  # the controller's process, and when (Unix time) it ends the ranks
FAILURE_GRACE_SECONDS = 5  # for the other ranks to notice and log that one has failed
INTERRUPT_SECONDS = 1  # for interrupted ranks to end before they are killed
LOCK_SECONDS = 3  # a flow that tests the lock holds it for an instant
RECORD_SECONDS = 60  # for a controller to write its record once it holds its lock
START_SECONDS = 300  # for the user's set-up lines and the start of a controller
CONTROLLER_LOG = "controller.log"  # the file in a job's folder to which its controller prints
CANCEL_SECONDS = 8  # for an interrupted job to end before it is killed


class Controller:
    """Starts the ranks, ends all when one fails, and restarts them if the stage should continue, as a scheduler would
    requeue its job."""

    def __init__(self, request: StageRequest) -> None:
        self.request, self.stage_dir = request, request.context.stage_dir
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.exit_codes: list[int | None] = []
        self.timed_out = False
        signal.signal(signal.SIGTERM, lambda number, frame: self._send(number))

    def run(self) -> None:
        """Run the ranks, and restart them as long as the stage should continue."""
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
            "LOCAL_WORLD_SIZE": str(resources.ranks),  # this machine acts as all nodes
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
        """Wait until all ranks have ended or must be ended."""
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
            if any(self.exit_codes):  # one failed, or left to be restarted
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
        Record("local", str(os.getpid()), started, os.uname().nodename).write(record_path)
        controller = Controller(request)
        try:
            controller.run()
        finally:
            outcome = {"exit_codes": controller.exit_codes, "timed_out": controller.timed_out}
            write_json(outcome_path(request.key.folder, str(os.getpid())), outcome)


def lock_path(record_path: Path) -> Path:
    """The file that a job's controller keeps locked."""
    return record_path.with_suffix(".lock")


def outcome_path(folder: Path, job_id: str) -> Path:
    """The file that says how the ranks of a local job ended; it is missing if its controller was killed."""
    return folder / f"{job_id}_ended.json"


class LocalJob:
    """A controller process and its ranks, found again through the controller's record."""

    backend = "local"
    ask_seconds = 0.5

    def __init__(self, record: Record, folder: Path, attached: bool) -> None:
        self.record, self.folder, self.attached = record, folder, attached
        self.job_id = record.job_id

    def state(self) -> State:
        if _is_alive(self.record):
            return State("running", "RUNNING")
        outcome = self._outcome()
        if outcome is None:
            return State("ended", "its controller was killed", failed=True)
        if outcome["timed_out"]:
            return State("ended", "TIMEOUT", failed=True, reason="walltime")
        failed = self._failed_ranks()
        if not failed:
            return State("ended", "COMPLETED")
        words = ", ".join(_how_it_ended(rank, code) for rank, code in failed.items())
        return State("ended", words, True, "out of memory" if -signal.SIGKILL in failed.values() else None)

    def cancel(self) -> None:
        for number in (signal.SIGINT, signal.SIGKILL):
            if not _is_alive(self.record):
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(self.job_id), number)
            deadline = time.monotonic() + CANCEL_SECONDS
            while _is_alive(self.record) and time.monotonic() < deadline:
                time.sleep(0.05)

    def log(self, rank: int) -> Path:
        return log_path(self.folder, self.job_id, rank)

    def failure(self, ranks: int) -> Failure:
        return first_error(self.folder, ranks) or Failure(rank=min(self._failed_ranks(), default=0))

    def _outcome(self) -> dict[str, Any] | None:
        path = outcome_path(self.folder, self.job_id)
        return dict(json.loads(path.read_text())) if path.exists() else None

    def _failed_ranks(self) -> dict[int, int]:
        codes = (self._outcome() or {"exit_codes": []})["exit_codes"]
        return {rank: code for rank, code in enumerate(codes) if code}


def _is_alive(record: Record) -> bool:
    return record.started is not None and start_ticks(int(record.job_id)) == record.started


def _how_it_ended(rank: int, code: int) -> str:
    return f"rank {rank} exited with {code}" if code > 0 else f"rank {rank} was killed by {signal.Signals(-code).name}"


class LocalBackend:
    """The backend for this machine. A job is a controller process in its own session, which starts the ranks."""

    name = "local"

    def problems(self, config: Config) -> list[str]:
        if config.cluster.backend == self.name and config.cluster.container is not None:
            return ["cluster.container: --cluster local starts ranks outside of containers; remove the section"]
        return []

    def options(self, config: Config, stage: StageName) -> str:
        return ""

    def find(self, key: JobKey) -> LocalJob | None:
        deadline = time.monotonic() + RECORD_SECONDS
        while is_locked(lock_path(key.record_path)):
            record = Record.read(key.record_path)
            if record is not None and record.host != os.uname().nodename:
                raise JobError(f"the job runs on {record.host} as process {record.job_id}; resume the run there")
            if record is not None and _is_alive(record):
                return LocalJob(record, key.folder, attached=True)
            if time.monotonic() > deadline:
                raise JobError(f"{key.record_path} is locked but names no living process; remove it")
            time.sleep(0.05)  # the controller has the lock and is about to write its record
        return None

    def submit(self, request: StageRequest, environment: dict[str, str]) -> LocalJob | None:
        devices = visible_devices(request)
        with contextlib.ExitStack() as unless_known:  # without a record, cancelling the run would not find the job
            with interrupts_held():
                controller = _start(request, {**inherited(), **environment, "CUDA_VISIBLE_DEVICES": devices})
                unless_known.callback(_kill, controller.pid)  # a deferred interrupt is raised when the block ends
            job = self._wait_for(controller, request)
            unless_known.pop_all()
        return job

    def rank_environment(self, request: StageRequest) -> dict[str, str]:
        end_with_parent(int(os.environ[JOB_ID]))  # only its lock tells that the job is running
        return LOOPBACK  # the controller has set the rest

    def place(self, request: StageRequest) -> JobPlace:
        return JobPlace(os.environ[JOB_ID], float(os.environ[END_AT]))

    def requeue(self, request: StageRequest) -> None:
        """Do nothing: the controller reads from the stage's segments whether to continue."""

    def why_ended(self, segment: Segment) -> Reason:
        return "killed"  # along with its controller, which would have recorded any other reason

    def _wait_for(self, controller: subprocess.Popen[bytes], request: StageRequest) -> LocalJob | None:
        """Wait for the record of the controller just started, or of one that another flow started earlier."""
        key = request.key
        log = key.folder / CONTROLLER_LOG
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if (job := self.find(key)) is not None:
                return LocalJob(job.record, key.folder, attached=job.job_id != str(controller.pid))
            if controller.poll() is not None:
                # The job was so short that its lock was not seen; its record tells.
                record = Record.read(key.record_path)
                if record is not None and record.job_id == str(controller.pid):
                    return LocalJob(record, key.folder, attached=False)
                if request.result_path.exists():
                    return None
                how = f"exit code {controller.returncode}: {last_line(log)}"
                raise JobError(f"the job's controller, or a line of cluster.setup, ended at once ({how}); log: {log}")
            time.sleep(0.05)
        raise JobError(f"the job's controller did not start within {START_SECONDS} s; see {log}")


def _kill(controller: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(controller, signal.SIGKILL)


def _start(request: StageRequest, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the controller after the user's set-up lines, in its own session, out of reach of Ctrl-C, a hang-up and the
    end of the flow."""
    arguments = [str(request.key.context_path), request.entry, str(request.code)]
    controller = [sys.executable, *request.checked_python, "-m", "slurm.local", *arguments]
    script = "\n".join(["set -e", *request.context.config.cluster.setup, 'exec "$@"'])
    with (request.key.folder / CONTROLLER_LOG).open("ab") as log:
        return subprocess.Popen(
            ["bash", "-c", script, "bash", *controller],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def visible_devices(request: StageRequest) -> str:
    """The CUDA_VISIBLE_DEVICES of a job's controller."""
    resources = request.resources
    count = resources.ranks * resources.gpus_per_rank
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not count:
        return visible  # a flow passes them on to its stages; other ranks select theirs themselves
    devices = [device for device in visible.split(",") if device] or [str(number) for number in range(count)]
    if len(devices) < count:
        raise JobError(f"the job asks for {count} GPUs, and CUDA_VISIBLE_DEVICES = {visible} names {len(devices)}")
    return ",".join(devices[:count])


if __name__ == "__main__":
    main(sys.argv[1:])
