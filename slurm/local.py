"""Jobs on this machine: submitit's LocalExecutor, made to outlive the flow that submits."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import submitit
from submitit.local.local import LocalExecutor

from slurm.controller import is_locked
from slurm.interrupts import interrupts_held
from slurm.jobs import JobError, State
from slurm.records import Record, is_alive, read_record

START_SECONDS = 60
"""Longest time for a controller to start Python and write its record."""
CANCEL_SECONDS = 8


class LocalStageJob:
    """A controller process and its ranks, found again through the record that the controller writes."""

    backend: Literal["local"] = "local"

    def __init__(self, record: Record, folder: Path, attached: bool) -> None:
        self.record, self.folder, self.attached = record, folder, attached

    @property
    def job_id(self) -> str:
        return self.record.job_id

    def state(self) -> State:
        if is_alive(self.record):
            return State("running", "RUNNING")
        ended = self.folder / f"{self.job_id}_ended.json"
        if not ended.exists():
            return State("ended", "its controller was killed")
        outcome = json.loads(ended.read_text())
        if outcome["timed_out"]:
            return State("ended", "TIMEOUT")
        failed = [(rank, code) for rank, code in enumerate(outcome["exit_codes"]) if code]
        if not failed:
            return State("ended", "COMPLETED")
        return State("ended", ", ".join(_exit_word(rank, code) for rank, code in failed), failed[0][0])

    def cancel(self) -> None:
        group = int(self.job_id)
        for number in (signal.SIGINT, signal.SIGKILL):
            if not is_alive(self.record):
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
            deadline = time.monotonic() + CANCEL_SECONDS
            while is_alive(self.record) and time.monotonic() < deadline:
                time.sleep(0.05)


def _exit_word(rank: int, code: int) -> str:
    return f"rank {rank} exited with {code}" if code > 0 else f"rank {rank} was killed by {signal.Signals(-code).name}"


def find(record_path: Path, folder: Path) -> LocalStageJob | None:
    """The running local job of a stage, if there is one.

    Raises:
        JobError: it runs on another host of a shared file system.
    """
    deadline = time.monotonic() + START_SECONDS
    while is_locked(record_path):
        record = read_record(record_path)
        if record is not None and record.host != os.uname().nodename:
            raise JobError(f"the job runs on {record.host} as process {record.job_id}: resume the run there")
        if record is not None and is_alive(record):
            return LocalStageJob(record, folder, attached=True)
        if time.monotonic() > deadline:
            raise JobError(f"{record_path} is locked, but names no living process: remove it")
        time.sleep(0.05)  # the controller has the lock and is about to write its record
    return None


def submit(
    words: list[str],
    callable_: Any,
    folder: Path,
    record_path: Path,
    result_path: Path,
    *,
    parameters: dict[str, Any],
    environment: dict[str, str],
    setup: tuple[str, ...],
    max_timeouts: int,
) -> LocalStageJob | None:
    """Start a controller; none when the stage turned out to be finished.

    Args:
        words: what each rank runs, after `python`.
        callable_: what submitit pickles for the ranks.
    """
    executor = _DetachedExecutor(
        folder,
        words=words,
        record_path=record_path,
        result_path=result_path,
        environment=environment,
        setup=setup,
        max_timeouts=max_timeouts,
    )
    try:
        executor.update_parameters(**parameters)
    except ValueError as error:  # fewer GPUs are visible than asked for
        raise JobError(str(error)) from error
    known = False
    try:
        with interrupts_held(), submitit.helpers.clean_env():
            executor.submit(callable_)
        assert executor.process is not None
        job = _wait_for(executor.process, folder, record_path, result_path)
        known = True
    finally:
        if not known:  # interrupted, or too slow: without a record whoever cancels the run's jobs would not find it
            executor.kill()
    return job


def _wait_for(
    process: subprocess.Popen[bytes], folder: Path, record_path: Path, result_path: Path
) -> LocalStageJob | None:
    """The job of a controller that was just started, or of another one that was faster; none when neither is needed."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if (job := find(record_path, folder)) is not None:
            return LocalStageJob(job.record, folder, attached=job.record.job_id != str(process.pid))
        if process.poll() is not None:
            # So short that its lock was not seen; the record tells.
            record = read_record(record_path)
            if record is not None and record.job_id == str(process.pid):
                return LocalStageJob(record, folder, attached=False)
            if result_path.exists():
                return None
            raise JobError(f"the job's controller ended at once; see {folder / 'controller.log'}")
        time.sleep(0.05)
    raise JobError(f"the job's controller did not start within {START_SECONDS} s; see {folder / 'controller.log'}")


class _DetachedExecutor(LocalExecutor):
    """Starts `slurm.controller` in a session of its own, with its own output: Ctrl-C, hang-up and the end of the
    flow do not reach it."""

    def __init__(
        self,
        folder: Path,
        *,
        words: list[str],
        record_path: Path,
        result_path: Path,
        environment: dict[str, str],
        setup: tuple[str, ...],
        max_timeouts: int,
    ) -> None:
        super().__init__(folder, max_num_timeout=max_timeouts)
        self.words, self.record_path, self.result_path = words, record_path, result_path
        self.environment, self.setup = environment, setup
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join([sys.executable, *self.words])

    def _submit_command(self, command: str) -> Any:
        devices = self.parameters["visible_gpus"] or range(self.parameters["gpus_per_node"])
        variables = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(self.parameters["tasks_per_node"]),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * self.parameters["timeout_min"]),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(self.parameters["signal_delay_s"]),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1" if self.parameters["stderr_to_stdout"] else "",
            "CUDA_VISIBLE_DEVICES": ",".join(str(device) for device in devices[: self.parameters["gpus_per_node"]]),
        }
        controller = [sys.executable, "-m", "slurm.controller"]
        controller += [str(self.folder), str(self.record_path), str(self.result_path)]
        script = "\n".join(["set -e", *self.setup, 'exec "$@"'])
        with (self.folder / "controller.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", script, "bash", *controller],
                env={**os.environ, **self.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return submitit.LocalJob(self.folder, str(self.process.pid), list(range(self._num_tasks())), self.process)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
