"""Show the progress of a run: bars on a terminal, plain lines when the output is piped, and artifacts in Prefect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from slurm.backend import Job, State
from specrl.config import STAGES
from specrl.progress import ProgressState, clock, words
from tasks.run import Finished, Reporter

LINE_SECONDS = 10
"""The least number of seconds between two plain lines about the same stage."""
ARTIFACT_SECONDS = 5
"""The least number of seconds between two updates of a stage's progress in Prefect."""
WIDTH = max(len(stage) for stage in STAGES)
"""The width of the column of stage names, in characters."""


@contextmanager
def make_reporter(console: Console | None = None) -> Iterator[Reporter]:
    """Yield the reporter that suits the console.

    Args:
        console: Where to print; standard output by default.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield PlainReporter(console)
        return
    columns = TextColumn(f"{{task.description:{WIDTH}}}"), BarColumn(24), TextColumn("{task.fields[words]}")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        yield BarReporter(console, bars)


class PlainReporter:
    """Prints one line per event, and one every `LINE_SECONDS` while something moves."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._artifacts = _ProgressArtifacts()
        self._said = ("", 0.0)
        self._said_at = 0.0

    def submitted(self, stage: str, job: Job) -> None:
        verb = "attached to" if job.attached else "submitted"
        self._line(stage, f"{verb} {job.backend} job {job.job_id}; log {job.log(0)}")

    def polled(self, stage: str, state: State, progress: ProgressState | None) -> None:
        if state.phase == "pending":
            self._say_sometimes(stage, (state.detail, 0.0), f"in the queue ({state.detail})")
        elif progress is not None:
            self._artifacts.update(stage, progress)
            self._say_sometimes(stage, (progress.message, progress.done), words(progress))

    def finished(self, stage: str, done: Finished) -> None:
        self._artifacts.finish()
        how = "finished before" if done.cached else "done"
        job = f", job {done.job_id}" if done.job_id else ""
        self._line(stage, f"{how}: {clock(done.seconds)}{job}")

    def note(self, text: str) -> None:
        self.console.print(text, markup=False)

    def _say_sometimes(self, stage: str, what: tuple[str, float], text: str) -> None:
        now = time.monotonic()
        if what != self._said and now - self._said_at >= LINE_SECONDS:
            self._said, self._said_at = what, now
            self._line(stage, text)

    def _line(self, stage: str, text: str) -> None:
        self.console.print(f"{stage:{WIDTH}}  {text}", markup=False)


class BarReporter(PlainReporter):
    """Shows a bar for the stage that runs; the lines about finished stages stay above it."""

    def __init__(self, console: Console, bars: Progress) -> None:
        super().__init__(console)
        self._bars = bars
        self._bar: TaskID | None = None

    def submitted(self, stage: str, job: Job) -> None:
        super().submitted(stage, job)
        self._bar = self._bars.add_task(stage, total=None, words="")

    def polled(self, stage: str, state: State, progress: ProgressState | None) -> None:
        assert self._bar is not None
        if progress is None or state.phase == "pending":
            self._bars.update(self._bar, words=f"[dim]{state.detail.lower()}")
            return
        self._artifacts.update(stage, progress)
        self._bars.update(self._bar, total=progress.total, completed=progress.done, words=words(progress))

    def finished(self, stage: str, done: Finished) -> None:
        if self._bar is not None:
            self._bars.remove_task(self._bar)
            self._bar = None
        super().finished(stage, done)


class _ProgressArtifacts:
    """The progress of the running stage in Prefect, updated at most every `ARTIFACT_SECONDS`."""

    def __init__(self) -> None:
        self._artifact: object = None
        self._updated_at = 0.0

    def update(self, stage: str, progress: ProgressState) -> None:
        now = time.monotonic()
        if now - self._updated_at < ARTIFACT_SECONDS or not progress.total:
            return
        self._updated_at = now
        percent = 100.0 * progress.done / progress.total
        if self._artifact is None:
            self._artifact = create_progress_artifact(percent, key=f"{stage}-progress", description=progress.message)
        else:
            update_progress_artifact(self._artifact, percent, description=progress.message)  # type: ignore[arg-type]

    def finish(self) -> None:
        self._artifact = None
