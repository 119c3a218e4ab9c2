"""Show a run's progress: bars on a terminal, plain lines if the output is piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from slurm.backend import Job, State
from specrl.config import STAGES
from specrl.progress import ProgressState, clock, words
from specrl.report.tables import lasting

LINE_SECONDS = 10  # the least number of seconds between two plain lines about the same stage
WIDTH = max(len(stage) for stage in STAGES)  # the width of the column of stage names, in characters


@contextmanager
def make_reporter() -> Iterator[Reporter]:
    """Yield the reporter that suits standard error; standard output is for results."""
    console = Console(file=lasting(sys.stderr), highlight=False, soft_wrap=True)
    if not console.is_terminal:
        yield Reporter(console)
        return
    columns = TextColumn(f"{{task.description:{WIDTH}}}"), BarColumn(24), TextColumn("{task.fields[words]}")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        yield Reporter(console, bars)


class Reporter:
    """Prints a line per event and, for the running stage, a bar, or a line every `LINE_SECONDS` while it progresses."""

    def __init__(self, console: Console, bars: Progress | None = None) -> None:
        self.console, self._bars = console, bars
        self._bar: TaskID | None = None
        self._said, self._said_at = ("", 0.0), 0.0

    def submitted(self, stage: str, job: Job) -> None:
        verb = "attached to" if job.attached else "submitted"
        self._line(stage, f"{verb} {job.backend} job {job.job_id}; log {job.log(0)}")
        if self._bars is not None and self._bar is None:
            self._bar = self._bars.add_task(stage, total=None, words="")

    def polled(self, stage: str, state: State, progress: ProgressState | None) -> None:
        if state.phase == "pending":
            what, text = (state.detail, 0.0), f"in the queue ({state.detail})"
        elif progress is not None:
            what, text = (progress.message, progress.done), words(progress)
        else:
            return
        if self._bars is not None and self._bar is not None:
            total, done = (progress.total, progress.done) if progress is not None else (None, 0.0)
            self._bars.update(self._bar, total=total, completed=done, words=text)
        elif what != self._said and time.monotonic() - self._said_at >= LINE_SECONDS:
            self._said, self._said_at = what, time.monotonic()
            self._line(stage, text)

    def finished(self, stage: str, seconds: float, job_id: str | None, *, before: bool) -> None:
        if self._bars is not None and self._bar is not None:
            self._bars.remove_task(self._bar)
            self._bar = None
        job = f", job {job_id}" if job_id else ""
        self._line(stage, f"{'finished before' if before else 'done'}: {clock(seconds)}{job}")

    def note(self, text: str) -> None:
        self.console.print(text, markup=False)

    def _line(self, stage: str, text: str) -> None:
        self.note(f"{stage:{WIDTH}}  {text}")
