"""The process that computes rewards, each in a fork of itself. It ends with the rank that started it.

It imports the rewards once, inside the sandbox. Forks return numbers and texts as JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from specrl.config import ConfigError, DataConfig
from specrl.data.problems import Prompt
from specrl.data.rewards import sandbox
from specrl.data.rewards.code import refuse_open_sandbox
from specrl.data.rewards.environments import Turn, make_environment, play
from specrl.data.rewards.functions import judge, make_rewards, refuse_network, runs_code, starts_processes, warm_up
from specrl.processes import OTHERS_SIGNALS, become_helper, end_with_parent

ANSWER_BYTES = 65_536  # bytes of a fork's longest answer
CHECK_SECONDS = 0.05  # seconds between checks of a silent fork

Parts = list[float | str | None]
Judge = Callable[[Prompt, Any], Parts | Turn | str]
"""Called for each response, or for each turn of a conversation."""


@dataclass(frozen=True)
class Outcome:
    """The outcome for one response: exactly one field is set."""

    parts: Parts | None = None
    """The value of each part of the reward, None if it leaves the response out, or why it failed."""
    turn: Turn | None = None  # of an environment
    ended: int | None = None  # the exit code of a fork that ended without an answer, or minus its signal
    late: bool = False  # ended at `data.reward_timeout_s`
    failure: str | None = None  # why none of the above exists

    @classmethod
    def parse(cls, message: bytes) -> Outcome:
        """Parse the output of `json`; ValueError for anything else."""
        try:
            fields = json.loads(message)
            outcome = cls(**fields)
            if outcome.turn is not None:
                outcome = replace(outcome, turn=Turn.of(**fields["turn"]))
        except (RecursionError, TypeError, UnicodeDecodeError) as error:
            raise ValueError("no outcome") from error
        parts, failure, ended = outcome.parts, outcome.failure, outcome.ended
        if not (isinstance(parts, list | None) and isinstance(failure, str | None) and isinstance(ended, int | None)):
            raise ValueError("no outcome")
        for part in parts or ():
            if not (isinstance(part, str | None) or (isinstance(part, float) and math.isfinite(part))):
                raise ValueError("no outcome")
        found = parts is not None, outcome.turn is not None, failure is not None, ended is not None
        if sum((*found, outcome.late is True)) != 1:
            raise ValueError("no outcome")
        return outcome

    @classmethod
    def of(cls, found: Parts | Turn | str) -> Outcome:
        """The outcome for a `Judge`'s return value."""
        if not isinstance(found, Turn):
            return cls(failure=found) if isinstance(found, str) else cls(parts=found)
        size = len((outcome := cls(turn=found)).json())
        too_long = f"wrote {size} bytes of messages in a turn, and at most {ANSWER_BYTES} are allowed"
        return outcome if size <= ANSWER_BYTES else cls(failure=too_long)

    def json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def main(rank: Connection) -> None:
    """Answer prompts and responses with outcomes until the rank closes the connection.

    The first two messages are the rank's process id and the process's setup: sections as JSON (the first one's settings
    of rewards apply), the `environment.name` that answers turns in place of rewards, if any, and an empty private
    folder. The answer is JSON: `problem`, empty or why there is no such reward, and `gaps`, from `Confinement.gaps`.
    """
    parent = rank.recv()
    become_helper(parent)
    os.dup2(2, 1)  # for output of a reward's import, since standard output may be JSON (`specrl reward --json -`)
    texts, environment, scratch = rank.recv()
    sys.path[:] = [entry or str(Path.cwd()) for entry in sys.path]  # responses are scored in another folder
    sections = [DataConfig.model_validate_json(text) for text in texts]
    held = sandbox.available(sections[0].reward_network)
    if held.namespaces:
        sandbox.enter_namespaces(scratch, sections[0].reward_network)
        end_with_parent(parent)  # again: the kernel resets it when a process changes its privileges
        _go_on_in_child(rank)
    else:
        sandbox.adopt_orphans()
    sandbox.hide_memory()
    try:
        for section in sections:
            refuse_open_sandbox(held, runs_code(section, environment))
        judges, problem = [make_judge(section, environment) for section in sections], ""
    except ConfigError as error:
        judges, problem = [], str(error)
    rank.send_bytes(json.dumps({"problem": problem, "gaps": held.gaps(sections[0].reward_network)}).encode())
    if not problem:
        processes = [starts_processes(section, environment) for section in sections]
        Scorer(rank, sections[0], judges, processes, scratch, held).serve()
    os._exit(0)  # threads started by the reward must not keep the process alive


def make_judge(section: DataConfig, environment: str | None) -> Judge:
    """Make the environment, or else the parts of the section's reward; raise ConfigError if there is none."""
    if environment is not None:
        refuse_network(section, environment)
        return partial(play, make_environment(environment))
    rewards = make_rewards(section)
    for part, reward in zip(section.reward, rewards, strict=True):
        warm_up(section, part, reward)
    return lambda prompt, said: [judge(reward, prompt, said) for reward in rewards]


def _go_on_in_child(rank: Connection) -> None:
    child = os.fork()
    if not child:
        end_with_parent(0)  # id, inside the namespaces, of any process outside
        return
    rank.close()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


@dataclass
class Scorer:
    """The process that has imported the rewards, and its forks, which score one response each."""

    rank: Connection
    settings: DataConfig
    judges: Sequence[Judge]
    processes: Sequence[bool]  # whether each judge may start processes
    scratch: Path
    held: sandbox.Confinement

    def serve(self) -> None:
        """Answer messages `(section's index, arguments of its judge pickled)` until the rank closes the connection."""
        gc.collect()
        gc.freeze()  # so that forks do not touch, and thereby copy, imported objects
        self._base = sandbox.address_space()
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                section, message = self.rank.recv()
                self.rank.send_bytes(self._scored(section, message))

    def _scored(self, section: int, message: bytes) -> bytes:
        processes = self.processes[section]
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server, child = os.getpid(), os.fork()
        if not child:
            ours.close()
            self._score(server, section, message, folder, theirs, processes=processes)
        theirs.close()
        try:
            with ours:
                return _awaited(child, ours, self.settings.reward_timeout_s, supervised=processes and self.held.filters)
        finally:
            sandbox.end_all_children(child, self.held)
            _remove(folder)

    def _score(
        self, server: int, section: int, message: bytes, folder: Path, answer: socket.socket, *, processes: bool
    ) -> NoReturn:
        code = 70  # EX_SOFTWARE
        try:
            self.rank.close()
            _silence()
            if self.held.namespaces:
                os.setsid()  # elsewhere the rank ends this process's group
                for number in OTHERS_SIGNALS:  # by which `multiprocessing` ends what it has started
                    signal.signal(number, signal.SIG_DFL)
            os.chdir(folder)
            sandbox.limit_resources(self.settings.reward_timeout_s, self._base)
            listener = sandbox.confine(folder, self.held, network=self.settings.reward_network, processes=processes)
            end_with_parent(server)
            if listener is not None:
                socket.send_fds(answer, [b"listener"], [listener])
                os.close(listener)
            answer.send(Outcome.of(self.judges[section](*pickle.loads(message))).json())
            code = 0
        finally:
            os._exit(code)


def _remove(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


def _silence() -> None:
    """Discard output: a response may make its reward print without end, or to a terminal."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)


def _awaited(child: int, answer: socket.socket, timeout: float, *, supervised: bool) -> bytes:
    """A fork's answer, which only the rank reads, or an outcome in its place.

    A `supervised` fork first sends the descriptor for requesting processes.
    """
    deadline = time.monotonic() + timeout
    poll, listener, granted, closed = select.poll(), -1, 0, False
    poll.register(answer, select.POLLIN)
    try:
        while (left := deadline - time.monotonic()) > 0:
            for number, event in poll.poll(min(left, 0.001 if closed else CHECK_SECONDS) * 1000):
                if number == listener:
                    granted = sandbox.grant_process(listener, granted)
                    if event & (select.POLLHUP | select.POLLERR):  # no requester is left
                        poll.unregister(listener)
                    continue
                message, descriptors = _received(answer)
                if descriptors and supervised and listener < 0:
                    listener = descriptors[0]
                    poll.register(listener, select.POLLIN)
                elif message:
                    return message
                else:
                    closed = True
                    poll.unregister(answer)
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and (closed or not select.select([answer], [], [], 0)[0]):
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                return (Outcome(late=True) if code == -signal.SIGXCPU else Outcome(ended=code)).json()
        return Outcome(late=True).json()
    finally:
        if listener >= 0:
            os.close(listener)  # from now on no process can be started


def _received(answer: socket.socket) -> tuple[bytes, list[int]]:
    try:
        message, descriptors, _, _ = socket.recv_fds(answer, ANSWER_BYTES + 1, 1)
    except ConnectionError:
        return b"", []
    return message, descriptors
