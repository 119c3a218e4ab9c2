"""A thread that supervises a rank: signals, remaining time, `specrl stop`, and heartbeats.

A signal interrupts no collective: Python runs handlers in the main thread between two instructions, which may be
minutes apart. So the handlers here do nothing, and the thread reads from a socket which signals have arrived. It makes
the loop leave at the next step boundary or, if none comes in time, ends the job itself, so that requeueing never
depends on the main thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from slurm.backend import Backend, JobPlace, StageRequest, stop_asked
from slurm.environment import log_path
from slurm.failures import clear_errors, has_cause, is_of_connection, lacked_memory, write_error
from specrl import lifetime, logs
from specrl.artifacts import is_passing
from specrl.checks import Check
from specrl.checks.gpu import GIB, GpuNeeds, gather_facts, gpu_checks
from specrl.config import Config, Resources, StageName
from specrl.config.base import ENGINE_STAGES, TRAINER_STAGES
from specrl.events import record_event
from specrl.lifetime import LeftJobError, Lifetime, Stop
from specrl.lifetime.segments import (
    AGAIN,
    Reason,
    add_to_segment,
    begin_segment,
    end_segment,
    last_recorded_step,
    progress_mark,
    read_segments,
)

logger = logging.getLogger(__name__)

WALLTIME_SIGNAL, PREEMPTION_SIGNAL = signal.SIGUSR2, signal.SIGTERM
KILLING = (signal.SIGKILL, signal.SIGABRT, WALLTIME_SIGNAL, PREEMPTION_SIGNAL)
"""The signals that end a rank but not its stage. NCCL aborts a process whose peers are gone; a rank listens to the last
two only after its setup."""
WARNING_SECONDS = 90  # before its time limit, a job is warned by a signal, if the limit allows
EXIT_SECONDS = 10  # the latest time before its end to leave a job, so that it can be requeued
GRACE_SECONDS = 20  # assumed to remain after a signal, if the scheduler does not say
CAUSE_SECONDS = 2  # for a rank that lost its connection to another to see the other's error
AGAIN_CODE, STOPPED_CODE = 144, 143
"""The exit codes of a first rank that leaves a job so that another continues the stage, or because it is stopped
midway. They are not 0, which would leave the other ranks waiting."""
ATTEMPT = "SPECRL_ATTEMPT"  # how many times the backend has started this job id before
HANG_FILE = "hang"


def warning_seconds(resources: Resources) -> int:
    """The seconds before its limit at which a job is warned: at most a quarter of the limit."""
    return min(WARNING_SECONDS, resources.minutes * 15)


class Supervisor:
    def __init__(self, request: StageRequest, backend: Backend) -> None:
        self.request, self.backend = request, backend
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cluster, self.stage_dir = request.key.cluster, request.context.stage_dir
        self.lifetime = Lifetime(self.cluster)
        self.attempt = int(os.environ.get(ATTEMPT, "0"))
        heartbeats = request.key.folder / "heartbeats" / f"{os.environ['MASTER_PORT']}-{self.attempt}"
        self.heartbeats = Heartbeats(heartbeats, self.rank, self.world_size)
        self.segment: int | None = None  # the number of this job's segment, on the first rank
        self._end_at: float | None = None
        self._ask_at = float("inf")  # when to ask the scheduler again whether the limit was raised
        self._first_step_said = self._stacks_written = False
        self._beat_at, self._looked_at = float("-inf"), time.monotonic()
        self._beat_seconds = min(15.0, 60 * self.cluster.hang_minutes / 20)

    def run(self) -> int:
        """Call the stage's function and return the exit code of this rank."""
        lifetime.set_current(self.lifetime)
        wake_up = _listen()
        clear_errors(self.request.key.folder, self.rank)
        try:
            if self.rank == 0:
                self._begin()
            self.heartbeats.beat()
            threading.Thread(target=self._watch, args=[wake_up], name="supervisor", daemon=True).start()
            check_rank(self.request)
            self.request.call()
        except LeftJobError as left:
            return self._leave(left.stop) if self.rank == 0 else 0
        except Exception as error:
            with contextlib.suppress(OSError):  # a full log must not hide the error from the flow
                traceback.print_exc()
            return self._raised(error)
        if self.rank == 0:
            self._end("finished")
        return 0

    def _raised(self, error: Exception) -> int:
        reason: Reason = "failed"
        with contextlib.suppress(OSError):  # the file system that failed may be this one
            write_error(self.request.key.folder, self.rank, error)
        if is_of_connection(error) or is_passing(error):
            time.sleep(CAUSE_SECONDS if self.rank == 0 else 3 * CAUSE_SECONDS)
            reason = self._reason() if self.rank < 2 else reason  # the second, because the first may be lost
        if reason == "killed":
            text = str(error) if is_passing(error) else "the connection to another rank was lost"
            return self._leave(Stop(reason, text))
        if self.rank == 0 or reason == "out of memory":
            self._end(reason)
        return 1

    def _reason(self) -> Reason:
        """Why the job ends where this rank lost others or a file system, which alone does not speak against the stage.

        A rank that was ended for want of memory does if the stage got no further; srun says so while the others wait.
        """
        folder = self.request.key.folder
        with contextlib.suppress(OSError):  # what cannot be read speaks against nothing
            if has_cause(folder, self.world_size):
                return "failed"
            last, mark = next(reversed(read_segments(self.stage_dir)), None), progress_mark(self.stage_dir)
            if last is not None and last.mark == mark and lacked_memory(log_path(folder, last.job_id, 0)):
                return "out of memory"
        return "killed"

    def _begin(self) -> None:
        place = self.backend.place(self.request)
        self._end_at = place.end_at
        if place.end_at is not None:
            self.lifetime.leave_by = _monotonic(place.end_at) - self._exit_seconds()
            self._ask_at = (time.monotonic() + self.lifetime.leave_by) / 2
        if self.world_size > 1 and self._is_begun(place.job_id):
            raise LeftJobError(Stop("killed", "the second rank has ended the job"))
        if (gave_up := self._end_earlier(place.job_id)) is not None:
            raise ValueError(gave_up)
        before = read_segments(self.stage_dir)
        self.segment = begin_segment(self.stage_dir, place.job_id, node_name(), self.attempt).number
        if before:
            text = f"job {self.segment} goes on; the one before: {before[-1].reason}"
            record_event(self.stage_dir, "restart", text)

    def _is_begun(self, job_id: str) -> bool:
        segments = read_segments(self.stage_dir)
        return bool(segments) and (segments[-1].job_id, segments[-1].attempt) == (job_id, self.attempt)

    def _end_earlier(self, job_id: str) -> str | None:
        """End the latest segment if its job could not; return why the stage is given up although the scheduler has
        requeued this job id."""
        segments = read_segments(self.stage_dir)
        if not segments or segments[-1].reason is not None:
            return None
        reason, step = self.backend.why_ended(segments[-1]), last_recorded_step(self.stage_dir)
        end_segment(self.stage_dir, segments[-1].number, reason, step, self.cluster)
        ended = read_segments(self.stage_dir)[-1]
        return ended.gave_up if ended.job_id == job_id else None

    def _segment_of_first(self) -> int | None:
        """The number of this job's segment on another rank, which begins it if the first rank has not; None if the
        stage is given up. Otherwise a job whose first rank never starts would not count and be requeued for ever."""
        job_id = self.backend.place(self.request).job_id
        if self._is_begun(job_id):
            return read_segments(self.stage_dir)[-1].number
        if self._end_earlier(job_id) is not None:
            return None
        return begin_segment(self.stage_dir, job_id, "", self.attempt).number

    def _watch(self, wake_up: socket.socket) -> None:
        while True:
            woken, _, _ = select.select([wake_up], [], [], min(1.0, self._beat_seconds))
            try:
                for number in wake_up.recv(4096) if woken else b"":
                    self._told(number)
                self._look(60 * self.cluster.hang_minutes)
            except OSError as error:  # keep listening despite a full or silent disk
                logger.warning("supervision: %s", error)

    def _look(self, hang_seconds: float) -> None:
        now = time.monotonic()
        held_up, self._looked_at = now - self._looked_at, now
        if held_up > hang_seconds / 2:
            logger.warning("this rank was held up for %.0f s", held_up)
            self.heartbeats.look_anew()
            self.lifetime.held_up(held_up)
        if now - self._beat_at >= self._beat_seconds:
            self._beat_at = now
            # faulthandler writes the stacks even if no Python thread can run any more.
            faulthandler.dump_traceback_later(hang_seconds, exit=False)
            self.heartbeats.beat()
            logs.rotate()
            if self.heartbeats.reported_hang():
                self._write_stacks()
            stopped = self.heartbeats.stopped(hang_seconds, 60 * self.cluster.start_minutes)
            if stopped is not None:
                self._hang(stopped, self.heartbeats.silent_node)
        if (overdue := self.lifetime.overdue()) is not None:
            self._write_stacks()
            if self.rank == 0:
                self._hang(overdue)
        if self.rank == 0:
            self._look_as_first()

    def _look_as_first(self) -> None:
        life = self.lifetime
        if not self._first_step_said and self.segment is not None and life.first_step is not None:
            add_to_segment(self.stage_dir, self.segment, first_step=life.first_step)
            self._first_step_said = True
        if life.stop is None and stop_asked(self.request.context.run_dir):
            self._ask_to_leave(Stop("stopped", "specrl stop"))
        if time.monotonic() > self._ask_at and life.stop is None:
            self._ask_for_more_time()
        if life.leave_by is not None and time.monotonic() > life.leave_by and life.stop is None:
            self._ask_for_more_time()
        if life.leave_by is not None and time.monotonic() > life.leave_by:
            self._exit(life.stop or Stop("walltime", "the time limit of the job is near"))

    def _ask_for_more_time(self) -> None:
        """Move the end if the limit was raised; ask again after half of the remaining time."""
        if self._end_at is None or self.lifetime.leave_by is None:
            return
        end_at = max(self._end_at, self.backend.place(self.request).end_at or 0)
        self.lifetime.leave_by += end_at - self._end_at
        self._end_at, now = end_at, time.monotonic()
        self._ask_at = now + max(60.0, (self.lifetime.leave_by - now) / 2)

    def _told(self, number: int) -> None:
        if number not in (WALLTIME_SIGNAL, PREEMPTION_SIGNAL):
            return
        name = signal.Signals(number).name
        if self.rank != 0:
            reason: Reason = "walltime" if number == WALLTIME_SIGNAL else "preempted"
            self.lifetime.ask_to_leave(Stop(reason, name))
            return
        place = self.backend.place(self.request)
        if place.is_ending or (number == PREEMPTION_SIGNAL and self._is_for_this_rank(place)):
            logger.warning("%s: the job ends", name)
            end_process(128 + number)
        now, warned = time.time(), number == WALLTIME_SIGNAL
        guess = now + (warning_seconds(self.request.resources) if warned else GRACE_SECONDS)
        end_at = place.end_at if place.end_at is not None else guess
        is_limit = warned and (self._end_at is None or end_at >= self._end_at)
        stop = Stop("walltime" if is_limit else "preempted", f"{name}, {end_at - now:.0f} s before the end of the job")
        self._ask_to_leave(stop, _monotonic(end_at) - min(self._exit_seconds(), (end_at - now) / 3))

    def _is_for_this_rank(self, place: JobPlace) -> bool:
        """Whether a SIGTERM is meant only for this rank, not its job.

        A scheduler that preempts a job brings its end forward. If it has not, or does not answer but has given an end
        before, srun is ending the ranks because one has died, and how that rank ended decides about the stage. A rank
        with steps leaves in any case.
        """
        if self.lifetime.has_steps or self._end_at is None:
            return False
        return place.end_at is None or place.end_at >= self._end_at

    def _ask_to_leave(self, stop: Stop, leave_by: float | None = None) -> None:
        logger.warning("leaving the job (%s)", stop.text)
        if self.lifetime.has_steps:
            self.lifetime.ask_to_leave(stop, leave_by)
        else:
            self._exit(stop)

    def _hang(self, text: str, node: str = "") -> NoReturn:
        logger.error("%s; ending the job", text)
        self.heartbeats.report_hang(text)
        self._write_stacks()
        time.sleep(2 * self._beat_seconds + 1)  # the others check for the report at every heartbeat
        record_event(self.stage_dir, "hang", text, self.lifetime.step)
        segments = read_segments(self.stage_dir)
        if node and segments:
            add_to_segment(self.stage_dir, segments[-1].number, failed_node=node)
        self._exit(Stop("hang", text))

    def _write_stacks(self) -> None:
        if not self._stacks_written:
            self._stacks_written = True
            faulthandler.dump_traceback(sys.stderr, all_threads=True)

    def _exit(self, stop: Stop) -> NoReturn:
        os._exit(self._leave(stop) or STOPPED_CODE)  # regardless of the main thread; the job ends with this process

    def _leave(self, stop: Stop) -> int:
        """End the segment, requeue the job if the stage should continue, and return this rank's exit code."""
        try:
            again = self._end(stop.reason, stop.text)
        except OSError as error:  # disk full; the next job records how this one ended
            logger.warning("the end of the job is not recorded: %s", error)
            again = stop.reason in AGAIN
        if again:
            self.backend.requeue(self.request)
            return AGAIN_CODE
        return 1 if stop.reason in AGAIN else 0

    def _end(self, reason: Reason, text: str = "") -> bool:
        number = self.segment if self.rank == 0 else self._segment_of_first()
        if number is None:  # the segment could not even begin
            return False
        return end_segment(self.stage_dir, number, reason, self.lifetime.last_step, self.cluster, text)

    def _exit_seconds(self) -> float:
        return min(EXIT_SECONDS, warning_seconds(self.request.resources) / 3)


def _monotonic(unix_time: float) -> float:
    """Convert a time to the monotonic clock, because the node's clock may be set while the job runs."""
    return time.monotonic() + unix_time - time.time()


def _listen() -> socket.socket:
    """Have arriving signals written to a socket at once; return the end from which to read them."""
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    _kept_open.append(write_end)
    signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    for number in (WALLTIME_SIGNAL, PREEMPTION_SIGNAL):
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(after_in_child=_forget_signals)  # forked processes end as usual
    return read_end


_kept_open: list[socket.socket] = []


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (WALLTIME_SIGNAL, PREEMPTION_SIGNAL):
        signal.signal(number, signal.SIG_DFL)


def end_process(code: int) -> NoReturn:
    """End this process at once: everything is written, and tearing down an engine would take seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def node_name() -> str:
    """This node's name; in a Slurm job, Slurm's name for it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


class Heartbeats:
    """Writes this rank's heartbeat into this job's own folder, and watches those of others.

    The first rank watches all others, and the second watches the first. Only changes of files count, because the hosts'
    clocks differ.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
        self._folder, self._rank, self._clock = folder, rank, clock
        self._beats = 0
        self.silent_node = ""  # the stopped rank's node, if it ever had a heartbeat
        watched = {0: range(1, world_size), 1: range(1)}.get(rank, range(0))
        self._seen = {other: ("", clock()) for other in watched}

    def beat(self) -> None:
        self._beats += 1
        self._path(self._rank).write_text(f"{self._beats} {node_name()}")

    def stopped(self, hang_seconds: float, start_seconds: float) -> str | None:
        """Say in one line which watched rank is silent for too long (`start_seconds` at the start), or None."""
        now = self._clock()
        for rank, (text, since) in self._seen.items():
            found = self._read(rank)
            if found and found != text:  # a rank whose disk no longer answers hangs while writing: no heartbeat
                self._seen[rank] = (found, now)
            elif now - since > (hang_seconds if text else start_seconds):
                self.silent_node = text.partition(" ")[2]
                return f"rank {rank} has given no sign of life for {now - since:.0f} s"
        return None

    def look_anew(self) -> None:
        """Restart the count, because this process was held up for a while, and the others may have been too."""
        now = self._clock()
        self._seen = {rank: (text, now) for rank, (text, _) in self._seen.items()}

    def report_hang(self, text: str) -> None:
        (self._folder / HANG_FILE).write_text(text)

    def reported_hang(self) -> bool:
        return (self._folder / HANG_FILE).exists()

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}"

    def _read(self, rank: int) -> str:
        try:
            return self._path(rank).read_text()  # opening a file makes NFS revalidate it; stat does not
        except FileNotFoundError:
            return ""


def check_rank(request: StageRequest) -> None:
    """Check this rank's GPU, if its stage has one; a ValueError lists each reason why it would fail later."""
    config, stage = request.context.config, request.context.stage
    if not config.resources_of(stage).gpus_per_rank or not request.entry.startswith("specrl.stages."):
        return  # the needs of other functions are unknown
    found = gpu_checks(gather_facts(use_torch=True), needs_of(config, stage, request.context.device_bytes))
    for check in found:
        if check.status == "warn":
            logger.warning("%s", line_of(check))
    failed = [line_of(check) for check in found if check.status == "fail"]
    if failed:
        raise ValueError("\n".join(failed))


def line_of(check: Check) -> str:
    """A finding as one line, with its fix."""
    return f"{check.name}: {check.found}; {check.fix}" if check.fix else f"{check.name}: {check.found}"


def needs_of(config: Config, stage: StageName, planned_bytes: int) -> GpuNeeds:
    """A stage's requirements on each rank's GPU, given the bytes in the plan."""
    resources = config.resources_of(stage)
    has_engine = stage in ENGINE_STAGES
    return GpuNeeds(
        engine_fraction=config.engine.gpu_memory_fraction if has_engine else 0.0,
        planned_gib=planned_bytes / GIB,
        given_gib=resources.gpu_memory_gib,
        transformer_engine=stage in TRAINER_STAGES,
        fp8_generation=has_engine and stage != "pretrain" and config.precision.generation == "fp8",
        several_ranks=resources.ranks > 1,
    )
