"""A pool of processes that compute the rewards of a rank's responses while the engine keeps generating.

A reward that hangs, raises, ends its process or returns no number affects only its own response, which scores
`data.reward_on_failure`. Which process computes a reward, and when, changes no result.
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
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from specrl.config import Config, DataConfig
from specrl.data.held_out import config_of_set
from specrl.data.problems import Prompt
from specrl.data.rewards import sandbox
from specrl.data.rewards.environments import Turn
from specrl.data.rewards.functions import is_built_in, shortened, weighted
from specrl.data.rewards.worker import ANSWER_BYTES, Outcome, Parts
from specrl.processes import end_helper, start_helper

logger = logging.getLogger(__name__)

START_SECONDS = 600  # seconds for a process to import the reward
PATIENCE_SECONDS = 0.1  # seconds per reward above which another process is started, up to `data.reward_workers`
BACKLOG = 32  # waiting responses at which another process is started
TRIES = 2  # processes that a reward may end before it counts as failed: the first may have been killed from outside
GRACE_SECONDS = 30.0  # beyond `data.reward_timeout_s`, after which a silent process is ended
LONGEST_ANSWER = 2 * ANSWER_BYTES  # bytes that a process may send at once
LOST_IN_A_ROW = 16  # lost processes after which a user's reward that has never answered counts as broken
REASONS = 3  # reasons named in a summary of failures, most frequent first
LOGGED = 3  # failures of one generation that are logged in full
STRANGE = "answered with something else than an outcome, which the response may have made it do"


class RewardError(ValueError):
    """A reward is unusable: it cannot be imported, or it fails on every response."""


@dataclass(frozen=True)
class RewardFailure:
    """A response on which the reward failed; all texts are shortened."""

    prompt: str
    response: str
    reason: str
    by_response: bool = False  # ran out of time or memory, or ended its fork: other responses may not
    parts: tuple[int, ...] = (0,)  # the numbers of the reward's parts that have failed

    def __str__(self) -> str:
        return f"{self.reason}; prompt {self.prompt!r}, response {self.response!r}"


@dataclass(frozen=True)
class FailureTally:
    count: int = 0
    reasons: tuple[tuple[str, int], ...] = ()  # (reason, failures), the most frequent first
    first: RewardFailure | None = None
    by_response: int = 0  # how many are `RewardFailure.by_response`
    by_part: tuple[tuple[int, int], ...] = ()  # (number of the reward's part, failures)

    @classmethod
    def of(cls, failures: Iterable[RewardFailure]) -> FailureTally:
        return cls.merge(
            cls(1, ((one.reason, 1),), one, int(one.by_response), tuple((part, 1) for part in one.parts))
            for one in failures
        )

    @classmethod
    def merge(cls, tallies: Iterable[FailureTally]) -> FailureTally:
        """Merge the summaries of several ranks, in their order."""
        reasons, by_part, count, first, by_response = Counter[str](), Counter[int](), 0, None, 0
        for tally in tallies:
            reasons.update(dict(tally.reasons))
            by_part.update(dict(tally.by_part))
            count, first = count + tally.count, first or tally.first
            by_response += tally.by_response
        return cls(count, tuple(reasons.most_common(REASONS)), first, by_response, tuple(by_part.items()))


Judged = tuple[list[float], RewardFailure | None]
"""The values of a reward's parts, and why some are missing."""
Result = Judged | Turn | RewardFailure
"""The outcome for a response, or for a conversation so far."""


@dataclass(frozen=True)
class Scores:
    """The rewards of the responses of one generation."""

    parts: list[list[float]]
    """The values of the reward's parts by response, ordered by response number; NaN if a part leaves the response
    out."""
    failures: list[RewardFailure]  # in the same order; failures count as `data.reward_on_failure`
    waited_s: float
    weights: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, results: Sequence[Result], waited_s: float, config: DataConfig) -> Scores:
        """The scores of a generation's responses, ordered by number."""
        judged = [_judged(result, config) for result in results]
        failures = [failure for _, failure in judged if failure is not None]
        return cls([values for values, _ in judged], failures, waited_s, config.part_weights)

    @property
    def rewards(self) -> list[float]:
        return [weighted(self.weights, parts) for parts in self.parts]

    def log(self, what: str, on_failure: float) -> Scores:
        """Warn of failures; `what` is the key that names the reward."""
        for failure in self.failures[:LOGGED]:
            logger.warning("%s failed and counts as %g: it %s", what, on_failure, failure)
        if len(self.failures) > LOGGED:
            logger.warning("%s failed on %d more responses", what, len(self.failures) - LOGGED)
        return self


def _judged(result: Result, config: DataConfig) -> Judged:
    if isinstance(result, RewardFailure):
        return [config.reward_on_failure] * len(config.reward), result
    return ([result.reward], None) if isinstance(result, Turn) else result


@dataclass(frozen=True)
class _Job:
    section: int  # index into `RewardPool.sections`
    prompt: Prompt
    response: str | tuple[str, ...]  # for an environment: the turns so far
    data: DataConfig  # that section
    result: Future[Result] = field(default_factory=Future)

    def failed(self, reason: str, parts: Sequence[int] | None = None) -> RewardFailure:
        """The failure of some parts, or of all of them."""
        numbers = tuple(range(len(self.data.reward)) if parts is None else parts)
        said = self.response if isinstance(self.response, str) else " / ".join(self.response)
        return RewardFailure(shortened(self.prompt.text), shortened(said), reason, parts=numbers)

    def judged(self, parts: Parts) -> Judged:
        """The outcome of each part, from `Outcome.parts`."""
        failed = [number for number, part in enumerate(parts) if isinstance(part, str)]
        on_failure = self.data.reward_on_failure
        values = [math.nan if part is None else on_failure if isinstance(part, str) else part for part in parts]
        if not failed:
            return values, None
        where = f" (in {self.data.part_names[failed[0]]})" if self.data.part_names else ""
        return values, self.failed(f"{parts[failed[0]]}{where}", failed)


class RewardPool:
    """The processes of one rank. One starts at once, more if rewards take long; each has a thread here."""

    def __init__(self, config: DataConfig, *others: DataConfig, environment: str | None = None) -> None:
        """Start the first process without waiting; the settings of `config` also apply to the rewards of `others`.

        If `environment.name` is set, the environment answers turns in place of all rewards.
        """
        self.config, self.environment = config, environment
        self.key = "data.reward" if environment is None else "environment.name"  # names what judges responses
        self.named = named(config, environment)
        self.sections = {section.model_dump_json(): section for section in (config, *others)}
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.error: Exception | None = None  # why the pool can do nothing more
        self.closed = False
        self.has_answered = False  # from then on the reward counts as working, whatever later responses make it do
        self._lock = threading.Lock()
        self._lost = 0
        self._said = False
        self._ready = threading.Event()
        self._workers: list[_Worker] = []
        self.grow()

    def begin(self, data: DataConfig) -> Scoring:
        """Begin scoring a generation's responses with the reward of `data`, one of the pool's sections."""
        return Scoring(self, data)

    def grow(self) -> None:
        """Start another process, unless there are already `data.reward_workers`."""
        with self._lock:
            if len(self._workers) < self.config.reward_workers and not self.closed:
                self._workers.append(_Worker(self))

    def started(self, gaps: str) -> None:
        """Note that a process has imported the rewards; warn once of what the sandbox cannot prevent here."""
        with self._lock:
            if gaps and not self._said:
                logger.warning("%s runs without a part of its sandbox: on this machine it could %s", self.key, gaps)
            self._said = True
        self._ready.set()

    def wait_until_ready(self) -> None:
        """Wait until the first process has imported the rewards or failed to."""
        self._ready.wait()

    def lost(self, failure: RewardFailure) -> None:
        """Note that a process was lost to a response."""
        with self._lock:
            self._lost += 1
            is_own = not is_built_in(self.config, self.environment)
            if self._lost == LOST_IN_A_ROW and not self.has_answered and is_own:
                self.error = RewardError(
                    f"{self.named} was lost {LOST_IN_A_ROW} times in a row; the last one "
                    f"{failure}; fix it, or give it more time (data.reward_timeout_s = "
                    f"{self.config.reward_timeout_s:g})"
                )

    def close(self) -> None:
        """End all processes, including busy ones."""
        with self._lock:
            self.closed = True
        for _ in self._workers:
            self.jobs.put(None)
        for worker in self._workers:
            worker.end()


class Scoring:
    """The rewards of one generation's responses, each requested as soon as the response is finished."""

    def __init__(self, pool: RewardPool, data: DataConfig) -> None:
        self._pool = pool
        self._data, self._section = data, list(pool.sections).index(data.model_dump_json())
        self._asked: dict[int, Future[Result]] = {}

    def submit(self, number: int, prompt: Prompt, response: str | tuple[str, ...]) -> None:
        """Request the reward of a response, or an environment's answer to turns.

        Raises:
            RewardError: The pool is unusable.
        """
        if self._pool.error is not None:
            raise self._pool.error
        job = _Job(self._section, replace(prompt, tokens=[]), response, self._data)
        self._asked[number] = job.result
        self._pool.jobs.put(job)

    def wait(self, *, logs: bool = True) -> Scores:
        """Wait for the rewards of all responses; RewardError if the pool is unusable."""
        started = time.perf_counter()
        scores = Scores.of([*self.results().values()], time.perf_counter() - started, self._data)
        return scores.log(self._pool.key, self._data.reward_on_failure) if logs else scores

    def results(self) -> dict[int, Result]:
        """Wait for the outcomes of all responses, by number; RewardError if the pool is unusable."""
        return {number: self._asked[number].result() for number in sorted(self._asked)}


class _Worker:
    """One process and the thread that waits for it, which is the process's parent to the kernel."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._scratch = Path(tempfile.mkdtemp(prefix="specrl-reward-"))
        atexit.register(shutil.rmtree, self._scratch, ignore_errors=True)
        self._thread = threading.Thread(target=self._run, name="reward-worker", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._kill()
        self._thread.join()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _run(self) -> None:
        try:
            self._running()
        except Exception as error:  # raised in the rank's main thread when it requests a reward
            self._pool.error = error
            self._pool.started("")
        while (job := self._pool.jobs.get()) is not None:
            try:
                if self._pool.error is not None:
                    raise self._pool.error
                job.result.set_result(self._result(job))
            except Exception as error:  # raised in the rank's main thread, which waits for an answer
                self._pool.error = error
                job.result.set_exception(error)
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            end_helper(self._process)

    def _result(self, job: _Job) -> Result:
        try:
            message = pickle.dumps((job.prompt, job.response))
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            return job.failed(f"cannot be asked, since the problem's data cannot be copied: {shortened(str(error))}")
        if self._pool.jobs.qsize() > BACKLOG:
            self._pool.grow()
        for _ in range(TRIES):
            outcome = self._asked(self._running(), job.section, message)
            if outcome.late:
                return self._lost(job, f"took longer than data.reward_timeout_s = {self._timeout:g}")
            if (code := outcome.ended) is not None:  # as in `subprocess`
                ending = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
                continue
            self._pool.has_answered = True
            found = outcome.parts if self._pool.environment is None else outcome.turn
            if found is None or (isinstance(found, list) and len(found) != len(job.data.reward)):
                return job.failed(outcome.failure or STRANGE)
            return job.judged(found) if isinstance(found, list) else found
        return self._lost(job, f"ended its process {TRIES} times ({ending})")

    def _asked(self, connection: Connection, section: int, message: bytes) -> Outcome:
        """The outcome for a response; not only the fork but also the process may hang or end itself."""
        try:
            connection.send((section, message))
            if not self._answers(connection):
                self._kill()
                return Outcome(late=True)
            answer = connection.recv_bytes(LONGEST_ANSWER)
        except (EOFError, OSError):
            self._kill()
            assert self._process is not None
            return Outcome(ended=self._process.returncode)
        try:
            return Outcome.parse(answer)
        except ValueError:
            return Outcome(failure=STRANGE)

    def _lost(self, job: _Job, reason: str) -> RewardFailure:
        failure = replace(job.failed(reason), by_response=True)
        self._pool.lost(failure)
        return failure

    @property
    def _timeout(self) -> float:
        return self._pool.config.reward_timeout_s

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
        raise RewardError(f"{self._pool.named}: its process cannot be started, see the log")

    def _start(self) -> None:
        if self._connection is not None:
            self._connection.close()
        variables = sandbox.environment(self._pool.config.reward_environment, self._scratch)
        self._process, self._connection = start_helper("specrl.data.rewards.worker", variables)
        if self._pool.closed:  # perhaps before the process existed
            self._kill()
        try:
            self._connection.send((list(self._pool.sections), self._pool.environment, self._scratch))
            if not self._connection.poll(START_SECONDS):
                self._kill()
                raise RewardError(f"{self._pool.named}: its import took longer than {START_SECONDS} s")
            answer = json.loads(self._connection.recv_bytes(LONGEST_ANSWER))
        except (EOFError, OSError):
            self._kill()
            return
        if answer["problem"]:
            raise RewardError(answer["problem"])
        self._pool.started(answer["gaps"])


def start_rewards(config: Config, rank: int, sets: Iterable[str] = ()) -> RewardPool | None:
    """Start a rank's pool, also for these held-out sets; None if another rank of the engine scores the same."""
    if rank % config.engine.tensor_parallel:
        return None
    others = (config_of_set(config, name).data for name in sets)
    return RewardPool(config.data, *others, environment=config.environment.name)


def named(config: DataConfig, environment: str | None) -> str:
    """What judges responses, as `KEY = VALUE`."""
    return f"environment.name = {environment!r}" if environment else f"data.reward = {config.reward_words!r}"


def describe(failures: FailureTally, num_responses: int) -> str:
    """One line about the failures (at least one) among a generation's responses."""
    assert failures.first is not None, "there is a failure to describe"
    counted = "; ".join(f"{count} x it {reason}" for reason, count in failures.reasons)
    return (
        f"the reward failed on {failures.count} of {num_responses} responses: {counted}; the first one: prompt "
        f"{failures.first.prompt!r}, response {failures.first.response!r}"
    )


def refuse_failure(
    failures: FailureTally, num_responses: int, config: DataConfig, environment: str | None = None
) -> None:
    """Raise RewardError if a part of a reward failed on all responses of a generation, over all ranks.

    A built-in reward that no response allows to finish is exempt: a policy must not be able to end its run.
    """
    if is_built_in(config, environment) and failures.by_response == failures.count:
        return
    if num_responses and num_responses in dict(failures.by_part).values():
        raise RewardError(
            f"{named(config, environment)} failed on all {num_responses} responses: the first one {failures.first}; "
            "nothing can be learned from it, so fix it and resume the run"
        )
