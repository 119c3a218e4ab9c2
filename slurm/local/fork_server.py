"""The process from which the controllers of a flow's local jobs, and so their ranks, are forked.

`python -m slurm.local.fork_server FILE_DESCRIPTOR` imports what the stages of a run need, once for all of them. It ends
with the flow; jobs do not. It has the code, the set-up lines and the environment of one run, and computes nothing. It
asks libraries for one thread, whatever the set-up lines say: with more, some start theirs when they are imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from setproctitle import getproctitle

from slurm.backend import JobError
from slurm.environment import THREAD_VARIABLES
from slurm.local.forks import INHERITED, Command, open_files
from slurm.ranks.preflight import ENGINE_STAGES, MEGATRON_STAGES
from specrl.config import STAGES, StageName
from specrl.tracking.store import import_mlflow

START_SECONDS = 300
"""The longest time that the imports and the user's set-up lines may take."""
TITLE_ROOM = "SPECRL_TITLE_ROOM"
"""A variable that says nothing: what `ps` shows of a fork is written over the environment that the process got."""
LOOK_SECONDS = 1.0
"""How often the flow looks whether the process lives: what the set-up lines started may hold its end of the socket."""


class ServerKilledError(JobError):
    """The process was killed before it had forked anything, such as by the kernel; another one may live."""


@dataclass(frozen=True)
class Order:
    """A controller that is to be forked."""

    arguments: list[str]
    environment: dict[str, str]
    """The flow's own variables. Where the set-up lines have changed one of them, that counts instead."""
    log: str
    stage: StageName | None
    """The stage whose modules the ranks need; None if they are not forked, or run something else."""


class ForkServer:
    """The flow's side: starts the process, and has it fork controllers."""

    def __init__(
        self, setup: Sequence[str], environment: Mapping[str, str], log: Path, options: Sequence[str] = ("-u",)
    ) -> None:
        """Start the process, in a session of its own.

        Args:
            setup: Lines of a shell that come first.
            environment: All its variables before the set-up lines; those of threads are set after them.
            log: The file to which the set-up lines and the imports print.
            options: The options of Python, such as those with which it checks the code before it imports any.
        """
        self._setup, self._environment = tuple(setup), dict(environment)
        threads = (f"export {name}=1" for name in THREAD_VARIABLES)
        script = "\n".join(["set -e", *setup, *threads, 'exec "$@"'])
        ours, theirs = socket.socketpair()
        command = [sys.executable, *options, "-m", "slurm.local.fork_server", str(theirs.fileno())]
        with theirs, log.open("ab") as file:
            self._process = subprocess.Popen(
                ["bash", "-c", script, "bash", *command],
                env={**self._environment, TITLE_ROOM: "." * 4096},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket, self._log = ours, log
        self._socket.settimeout(LOOK_SECONDS)

    def fork(self, order: Order) -> int:
        """Have a controller forked and return its process id; after an interrupt there is none.

        Raises:
            ServerKilledError: The process was killed.
            JobError: The process has ended in another way, or takes too long.
        """
        before = {name: self._environment.get(name) for name in order.environment}
        answer = b""
        try:
            self._socket.sendall(json.dumps([asdict(order), before]).encode() + b"\n")
            answer = self._receive()
        except TimeoutError as error:
            raise JobError(f"the job's controller did not start within {START_SECONDS} s; see {self._log}") from error
        except OSError:  # the process has ended
            pass
        finally:
            if not answer:
                self.close()
        if answer:
            return int(answer)
        kind = ServerKilledError if self._process.returncode < 0 else JobError
        raise kind(f"the job's controller ended at once; see {self._log}")

    def _receive(self) -> bytes:
        """Return the answer, or nothing if the process has ended.

        Raises:
            TimeoutError: The process lives, but takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        answer: bytes | None = None
        while answer is None:
            ended = self._process.poll() is not None
            try:
                answer = self._socket.recv(32)
            except TimeoutError:
                if ended:
                    return b""
                if time.monotonic() > deadline:
                    raise
        if not answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)  # it is ending, and may still print why
        return answer

    def serves(self, setup: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Return whether the process lives, and jobs with these set-up lines and variables can be forked from it."""
        same = (tuple(setup), dict(environment)) == (self._setup, self._environment)
        return same and self._process.poll() is None

    def close(self) -> None:
        """End the process, and a controller that it has forked without anybody knowing."""
        self._process.kill()
        self._process.wait()
        try:
            self._socket.settimeout(5)
            while answer := self._socket.recv(32):
                os.killpg(int(answer), signal.SIGKILL)
        except OSError:  # it has ended, there was none, or this is called again
            pass
        self._socket.close()


def main(arguments: list[str]) -> None:
    """Fork a controller for each line that comes from the flow, and end when there are no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # controllers that end are nobody's to wait for
    getproctitle()  # finds the memory for titles, which it cannot once a variable has changed
    os.environ.pop(TITLE_ROOM, None)
    present = dict(os.environ)  # before a library sets any
    with socket.socket(fileno=int(arguments[0])) as flow, flow.makefile() as lines:
        for line in lines:
            values, before = json.loads(line)
            order = Order(**values)
            if order.stage is not None:
                _load_or_say([order.stage])
            kept = open_files() - {flow.fileno()}
            environment = unchanged(order.environment, before, present)
            environment[INHERITED] = " ".join(map(str, kept))
            command = Command("slurm.local.controller", order.arguments, environment, Path(order.log))

            def first() -> None:
                os.setsid()  # Ctrl-C, a hang-up and the end of the flow do not reach it
                flow.sendall(f"{os.getpid()}\n".encode())

            gc.freeze()  # or collections would copy the memory that forks share
            command.fork(kept, first)
            if order.stage is not None:
                _load_or_say(STAGES)  # while the first stage is at work


def unchanged(
    variables: Mapping[str, str], before: Mapping[str, str | None], after: Mapping[str, str]
) -> dict[str, str]:
    """Return those of the flow's variables that the set-up lines have left alone.

    Args:
        variables: The flow's variables.
        before: The values that they had before the set-up lines; None where they had none.
        after: The environment after the set-up lines.
    """
    return {name: value for name, value in variables.items() if before[name] == after.get(name)}


def _load_or_say(stages: Sequence[StageName]) -> None:
    """Import what the ranks of these stages will import; the rank that cannot will fail and report why."""
    try:
        _load(stages)
    except ImportError:
        traceback.print_exc()


def _load(stages: Sequence[StageName]) -> None:
    """Import what the ranks of these stages will import."""
    from specrl.models.light_transformers import skip_unused_parts  # transformers takes too long for the flow

    skip_unused_parts()
    for stage in stages:
        importlib.import_module(f"specrl.stages.{stage}")
    import_mlflow()
    if set(stages) & set(MEGATRON_STAGES):
        from specrl.training.megatron.cpu.kernels import load_compiler

        load_compiler()
        importlib.import_module("specrl.training.megatron.policy")
        importlib.import_module("specrl.models.tiny")  # and with it transformers' models
    if set(stages) & set(ENGINE_STAGES):
        from specrl.rollout.vllm.engine.lifecycle import import_engine  # imports torch, as the flow must not

        import_engine()


if __name__ == "__main__":
    main(sys.argv[1:])
