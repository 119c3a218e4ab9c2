"""The progress of a stage: a small file that rank 0 writes at most twice a second, and that the flow reads."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from specrl.artifacts import read_json, write_json

PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class ProgressState:
    """The progress of one phase: `done` of `total` units. Times are Unix seconds."""

    done: float
    total: float
    message: str
    unit: str
    started_at: float  # the time of the phase's first report
    started_done: float
    """The units done at the first report: not 0 after a restart, and not counted in the pace."""
    updated_at: float  # the time of the latest report

    @property
    def eta_seconds(self) -> float | None:
        """The seconds left at the pace so far; None before something has been done."""
        done = self.done - self.started_done
        return (self.updated_at - self.started_at) * (self.total - self.done) / done if done > 0 else None


_STATE = TypeAdapter(ProgressState)


class Progress:
    """Reports the progress of a stage, phase after phase.

        with Progress(context.stage_dir, enabled=ranks.is_first) as progress:
            for step in range(num_steps):
                progress.update(step, num_steps, message=f"reward {reward:.2f}", unit="step", phase="train")
                ...

    Report the units already done when a phase begins (0, or where it resumes): the estimate counts from there. `update`
    is cheap: it writes at most every `interval` seconds, and always for the first report and the last unit of a phase.
    """

    def __init__(self, stage_dir: Path, *, enabled: bool = True, interval: float = 0.5) -> None:
        self._path = stage_dir / PROGRESS_FILE
        self._enabled = enabled
        self._interval = interval
        self._phase: str | None = None
        self._started_at, self._started_done = time.time(), 0.0
        self._pending: ProgressState | None = None
        self._written_at = 0.0

    def update(self, done: float, total: float, *, message: str = "", unit: str = "", phase: str | None = None) -> None:
        """Report that `done` of `total` units are done.

        Args:
            message: A text shown beside the bar, such as a loss.
            unit: The name of one unit, such as `step` or `response`.
            phase: The name of the phase; a new name starts the estimate anew.
        """
        if not self._enabled:
            return
        now = time.time()
        if phase != self._phase:
            self._phase, self._written_at = phase, 0.0
            self._started_at, self._started_done = now, done
        text = ": ".join(part for part in (self._phase, message) if part)
        self._pending = ProgressState(done, total, text, unit, self._started_at, self._started_done, now)
        if done >= total or now - self._written_at >= self._interval:
            self._write()

    def _write(self) -> None:
        if self._pending is not None:
            with contextlib.suppress(OSError):  # on a full disk the stage goes on without progress reports
                write_json(self._path, asdict(self._pending))
            self._pending, self._written_at = None, time.time()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()


def read_progress(stage_dir: Path) -> ProgressState | None:
    """The stage's last report; None without one that this version can read."""
    try:
        return _STATE.validate_python(read_json(stage_dir / PROGRESS_FILE))
    except ValidationError:  # not yet there, or of another version of the code
        return None


def words(progress: ProgressState) -> str:
    """Progress in words, such as `12/160 response  loss 0.41  ETA 1:20`."""
    left = progress.eta_seconds
    parts = [
        f"{progress.done:g}/{progress.total:g} {progress.unit}".rstrip(),
        progress.message,
        f"ETA {clock(left)}" if left is not None and progress.done < progress.total else "",
    ]
    return "  ".join(part for part in parts if part)


def clock(seconds: float) -> str:
    """A duration as `M:SS`, or as `H:MM:SS` from an hour on."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
