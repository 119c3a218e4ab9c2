"""A pool of processes that compute the rewards of a rank's responses while the engine goes on generating.

A reward that hangs, raises, ends its process or returns what is no number costs its own response the score
`data.reward_on_failure`, and nothing else. Which process computes a reward, and when, changes no result.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import pickle
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from specrl.config import Config, DataConfig
from specrl.data.held_out import config_of_set
from specrl.data.problems import Prompt
from specrl.data.rewards import sandbox
from specrl.data.rewards.functions import is_built_in, shortened
from specrl.data.rewards.worker import ANSWER_BYTES, Order, Outcome
from specrl.processes import end_helper, start_helper

logger = logging.getLogger(__name__)

WORKER = "specrl.data.rewards.worker"
"""The module of the processes."""
START_SECONDS = 600
"""The time limit for a process to import the reward."""
PATIENCE_SECONDS = 0.1
"""The time that one reward may take before another process is started, up to `data.reward_workers`."""
BACKLOG = 32
"""The number of waiting responses at which another process is started."""
TRIES = 2
"""The processes that a reward may end until it counts as failed: the first one may have been killed by anybody."""
GRACE_SECONDS = 30.0
"""The time beyond `data.reward_timeout_s` after which a process that says nothing is ended."""
LONGEST_ANSWER = 2 * ANSWER_BYTES
"""The bytes that a process may send at once."""
LOST_IN_A_ROW = 16
"""The time-outs and ended processes after which an own reward that has never given a number counts as broken."""
REASONS = 3
"""The most frequent reasons that are named where failures are summed up."""
LOGGED = 3
"""The failures among the responses of one generation that are logged in full."""


class RewardError(ValueError):
    """A reward that judges no response at all: it cannot be imported, or it fails on every one."""


@dataclass(frozen=True)
class RewardFailure:
    """A response on which the reward failed; all texts are shortened."""

    prompt: str
    response: str
    reason: str
    by_response: bool = False
    """The response took more time or memory than it may, or ended the fork that scored it: another one may not."""

    def __str__(self) -> str:
        return f"{self.reason}; prompt {self.prompt!r}, response {self.response!r}"


@dataclass(frozen=True)
class FailureTally:
    """The failures of a reward, summed up: their number, their most frequent reasons and the first of them."""

    count: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    """(reason, failures) of the `REASONS` most frequent reasons."""
    first: RewardFailure | None = None
    by_response: int = 0
    """The failures that are `RewardFailure.by_response`."""

    @classmethod
    def of(cls, failures: Sequence[RewardFailure]) -> FailureTally:
        """Sum up failures."""
        reasons = Counter(failure.reason for failure in failures).most_common(REASONS)
        by_response = sum(failure.by_response for failure in failures)
        return cls(len(failures), tuple(reasons), failures[0] if failures else None, by_response)

    @classmethod
    def merge(cls, tallies: Iterable[FailureTally]) -> FailureTally:
        """Sum up what several ranks have summed up, in their order."""
        reasons, count, first, by_response = Counter[str](), 0, None, 0
        for tally in tallies:
            reasons.update(dict(tally.reasons))
            count, first = count + tally.count, first or tally.first
            by_response += tally.by_response
        return cls(count, tuple(reasons.most_common(REASONS)), first, by_response)


@dataclass(frozen=True)
class Scores:
    """The rewards of the responses of one generation."""

    rewards: list[float]
    """The reward of each response, in the order of their numbers; NaN where the reward leaves the response out."""
    failures: list[RewardFailure]
    """The responses on which the reward failed, in the same order; their reward is `data.reward_on_failure`."""
    waited_s: float
    """The time that was waited for them, in seconds."""

    def in_groups(self, groups: Sequence[int]) -> list[float]:
        """The rewards with the mean of a response's group in place of one that is left out, so that it has no
        advantage; 0 where the whole group is.

        Args:
            groups: The group of each response.
        """
        known: dict[int, list[float]] = {}
        for group, reward in zip(groups, self.rewards, strict=True):
            known.setdefault(group, []).extend([] if math.isnan(reward) else [reward])
        means = {group: math.fsum(rewards) / max(1, len(rewards)) for group, rewards in known.items()}
        return [
            means[group] if math.isnan(reward) else reward for group, reward in zip(groups, self.rewards, strict=True)
        ]


@dataclass(frozen=True)
class _Job:
    number: int
    section: int
    """The place in `RewardPool.sections` of the section whose reward is asked for."""
    prompt: Prompt
    response: str
    results: SimpleQueue[tuple[int, float | RewardFailure | Exception]]

    def failed(self, reason: str) -> RewardFailure:
        return RewardFailure(shortened(self.prompt.text), shortened(self.response), reason)


class RewardPool:
    """The processes of one rank. One is started at once, others where rewards take long; each has a thread here."""

    def __init__(self, config: DataConfig, *others: DataConfig) -> None:
        """Start the first process, without waiting for it.

        Args:
            config: The section whose reward is used, and whose settings of rewards hold.
            others: Further sections whose rewards are used.
        """
        self.config = config
        self.sections = list(dict.fromkeys(section.model_dump_json() for section in (config, *others)))
        """All these sections, as JSON."""
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.error: Exception | None = None
        """The reason why the pool can do nothing more."""
        self.closed = False
        self._lock = threading.Lock()
        self._lost = 0
        self._has_answered = self._said = False
        self._ready = threading.Event()
        self._workers: list[_Worker] = []
        self.grow()

    def begin(self, data: DataConfig) -> Scoring:
        """The scoring of one generation's responses by the reward of one of the pool's sections."""
        return Scoring(self, data)

    def grow(self) -> None:
        """Start another process, unless there are `data.reward_workers` of them."""
        with self._lock:
            if len(self._workers) < self.config.reward_workers and not self.closed:
                self._workers.append(_Worker(self))

    def started(self, gaps: str) -> None:
        """Take note of a process that has imported the rewards; say once what it is not kept from doing here."""
        with self._lock:
            if gaps and not self._said:
                logger.warning("data.reward runs without a part of its sandbox: on this machine it could %s", gaps)
            self._said = True
        self._ready.set()

    def wait_until_ready(self) -> None:
        """Wait until the first process has imported the rewards, or cannot: who asks for one is told why."""
        self._ready.wait()

    def answered(self) -> None:
        """Take note of a process that has answered: the reward is not broken, whatever a later response makes it do."""
        with self._lock:
            self._has_answered = True

    def lost(self, failure: RewardFailure) -> None:
        """Take note of a process that was lost to a response."""
        with self._lock:
            self._lost += 1
            if self._lost == LOST_IN_A_ROW and not self._has_answered and not is_built_in(self.config):
                self.error = RewardError(
                    f"data.reward = {self.config.reward!r} was lost {LOST_IN_A_ROW} times in a row; the last one "
                    f"{failure}; fix it, or give it more time (data.reward_timeout_s = "
                    f"{self.config.reward_timeout_s:g})"
                )

    def close(self) -> None:
        """End all processes, also those that are at work."""
        with self._lock:
            self.closed = True
        for _ in self._workers:
            self.jobs.put(None)
        for worker in self._workers:
            worker.end()


class Scoring:
    """The rewards of one generation's responses, each of which is asked for as soon as it is finished."""

    def __init__(self, pool: RewardPool, data: DataConfig) -> None:
        self._pool = pool
        self._section = pool.sections.index(data.model_dump_json())
        self._results: SimpleQueue[tuple[int, float | RewardFailure | Exception]] = SimpleQueue()
        self._submitted = 0

    def submit(self, number: int, prompt: Prompt, response: str) -> None:
        """Ask for the reward of a response, which is given a number of its own.

        Raises:
            RewardError: The reward cannot be imported, or has lost too many processes.
        """
        if self._pool.error is not None:
            raise self._pool.error
        self._submitted += 1
        self._pool.jobs.put(_Job(number, self._section, replace(prompt, tokens=[]), response, self._results))

    def wait(self, *, logs: bool = True) -> Scores:
        """Wait until all responses have their reward.

        Args:
            logs: Whether to log failures.

        Raises:
            RewardError: The reward cannot be imported, or has lost too many processes.
        """
        started = time.perf_counter()
        results: dict[int, float | RewardFailure] = {}
        while len(results) < self._submitted:
            number, result = self._results.get()
            if isinstance(result, Exception):
                raise result
            results[number] = result
        ordered = [results[number] for number in sorted(results)]
        failures = [result for result in ordered if isinstance(result, RewardFailure)]
        on_failure = self._pool.config.reward_on_failure
        for failure in failures[:LOGGED] if logs else ():
            logger.warning("data.reward failed and counts as %g: it %s", on_failure, failure)
        if logs and len(failures) > LOGGED:
            logger.warning("data.reward failed on %d more responses", len(failures) - LOGGED)
        rewards = [on_failure if isinstance(result, RewardFailure) else result for result in ordered]
        return Scores(rewards, failures, time.perf_counter() - started)


class _Worker:
    """One process and the thread that waits for it. To the kernel this thread is the process's parent."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._scratch = Path(tempfile.mkdtemp(prefix="specrl-reward-"))
        atexit.register(shutil.rmtree, self._scratch, ignore_errors=True)
        self._thread = threading.Thread(target=self._run, name="reward-worker", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the process and, once there is nothing more to do, the thread."""
        self._kill()
        self._thread.join()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _run(self) -> None:
        """Start the process, and let it answer one response after another."""
        try:
            self._running()
        except Exception as error:  # the rank's main thread shall raise it, when it asks for a reward
            self._pool.error = error
            self._pool.started("")
        while (job := self._pool.jobs.get()) is not None:
            try:
                result = self._pool.error or self._reward(job)
            except Exception as error:  # the rank's main thread waits for an answer and shall raise it
                self._pool.error = result = error
            job.results.put((job.number, result))
        self._kill()

    def _kill(self) -> None:
        """End the process and what it has started."""
        if self._process is not None:
            end_helper(self._process)

    def _reward(self, job: _Job) -> float | RewardFailure:
        try:
            message = pickle.dumps((job.prompt, job.response))
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            return job.failed(f"cannot be asked, since the problem's data cannot be copied: {shortened(str(error))}")
        if self._pool.jobs.qsize() > BACKLOG:
            self._pool.grow()
        ending = ""
        for _ in range(TRIES):
            connection = self._running()
            try:
                connection.send((job.section, message))
                if not self._answers(connection):
                    self._kill()
                    return self._lost(job, self._late)
                outcome = Outcome.parse(connection.recv_bytes(LONGEST_ANSWER))
            except (EOFError, OSError, ValueError):
                self._kill()
                assert self._process is not None
                ending = how_ended(self._process.returncode)
                continue
            if outcome.late:
                return self._lost(job, self._late)
            if outcome.ended is not None:
                ending = how_ended(outcome.ended)
                continue
            self._pool.answered()
            if outcome.left_out:
                return math.nan
            return job.failed(outcome.failure or "") if outcome.score is None else outcome.score
        return self._lost(job, f"ended its process {TRIES} times ({ending})")

    def _lost(self, job: _Job, reason: str) -> RewardFailure:
        failure = replace(job.failed(reason), by_response=True)
        self._pool.lost(failure)
        return failure

    @property
    def _timeout(self) -> float:
        return self._pool.config.reward_timeout_s

    @property
    def _late(self) -> str:
        return f"took longer than data.reward_timeout_s = {self._timeout:g}"

    def _answers(self, connection: Connection) -> bool:
        patience = min(PATIENCE_SECONDS, self._timeout)
        if connection.poll(patience):
            return True
        self._pool.grow()
        return connection.poll(self._timeout - patience + GRACE_SECONDS)

    def _running(self) -> Connection:
        for attempt in range(1 + TRIES):
            if self._connection is not None and self._process is not None and self._process.poll() is None:
                return self._connection
            if attempt < TRIES and not self._pool.closed:
                self._start()
        raise RewardError(f"data.reward = {self._pool.config.reward!r}: its process cannot be started, see the log")

    def _start(self) -> None:
        """Start the process and wait until it has imported the reward.

        Raises:
            RewardError: There is no such reward, or its import takes too long.
        """
        if self._connection is not None:
            self._connection.close()
        variables = sandbox.environment(self._pool.config.reward_environment, self._scratch)
        self._process, self._connection = start_helper(WORKER, variables)
        if self._pool.closed:  # perhaps before there was a process to end
            self._kill()
        try:
            self._connection.send(Order(self._pool.sections, self._scratch))
            if not self._connection.poll(START_SECONDS):
                self._kill()
                raise RewardError(
                    f"data.reward = {self._pool.config.reward!r}: its import took longer than {START_SECONDS} s"
                )
            answer = json.loads(self._connection.recv_bytes(LONGEST_ANSWER))
        except (EOFError, OSError):
            self._kill()
            return
        if answer["problem"]:
            raise RewardError(answer["problem"])
        self._pool.started(answer["gaps"])


def start_rewards(config: Config, rank: int, sets: Iterable[str] = ()) -> RewardPool | None:
    """Start the pool of a rank; None where another rank of the same engine has the same responses and scores them.

    Args:
        sets: The names of the held-out sets that are to be scored as well.
    """
    if rank % config.engine.tensor_parallel:
        return None
    return RewardPool(config.data, *(config_of_set(config, name).data for name in sets))


def describe(failures: FailureTally, num_responses: int) -> str:
    """One line about the failures, of which there is one at least, among the responses of a generation."""
    assert failures.first is not None, "there is a failure to describe"
    counted = "; ".join(f"{count} x it {reason}" for reason, count in failures.reasons)
    return (
        f"the reward failed on {failures.count} of {num_responses} responses: {counted}; the first one: prompt "
        f"{failures.first.prompt!r}, response {failures.first.response!r}"
    )


def refuse_failure(failures: FailureTally, num_responses: int, config: DataConfig) -> None:
    """Refuse a reward that failed on all responses of a generation, over all ranks.

    A built-in reward that none of them let come to an end is not refused: a policy shall not be able to end its run.

    Raises:
        RewardError: It did; the message names the first of them.
    """
    if is_built_in(config) and failures.by_response == failures.count:
        return
    if num_responses and failures.count == num_responses:
        raise RewardError(
            f"data.reward = {config.reward!r} failed on all {num_responses} responses: the first one {failures.first}; "
            "nothing can be learned from it, so fix it and resume the run"
        )


def how_ended(code: int) -> str:
    """How a process ended, by the return code that `subprocess` gives it."""
    return f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
